#!/usr/bin/env bash
# Fits and measures cells of the grid; --help explains.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../common/environment.sh"
exec "$PYTHON" -m recipes glove_reconstruction train "$@"
