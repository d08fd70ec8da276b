#!/usr/bin/env bash
# Trains one published row; --help explains.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../common/environment.sh"
exec "$PYTHON" -m recipes.published.train wmt14_ende "$@"
