#!/usr/bin/env bash
# Trims and compresses the model, row by row; --help explains.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../common/environment.sh"
exec "$PYTHON" -m recipes shrink_a_model train "$@"
