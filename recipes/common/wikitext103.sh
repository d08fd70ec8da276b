#!/usr/bin/env bash
# Prepares WikiText-103, or WikiText-2 for small rows, for the recipe RECIPE: wikitext103.sh RECIPE [small]
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

recipe=$1
usage="usage: preprocess.sh [small]

Prepares WikiText-103 in \$RUNS/$recipe/data, or with 'small' WikiText-2 in \$RUNS/$recipe/data_small for the rows
small_*. The texts come from \$DATA_DIR/wikitext-103 or \$DATA_DIR/wikitext-2, or else from the network."
case "${2:-}" in
    "") dataset=wikitext103 folder=data ;;
    small) dataset=wikitext2 folder=data_small ;;
    -h | --help) echo "$usage"; exit 0 ;;
    *) echo "$usage" >&2; exit 2 ;;
esac
exec "$PYTHON" -c 'import lm.cli; lm.cli.prepare()' -dataset "$dataset" -output "$RUNS/$recipe/$folder"
