#!/usr/bin/env bash
# Measures one trained row; --help explains.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../common/environment.sh"
exec "$PYTHON" -m recipes ngram_tables eval "$@"
