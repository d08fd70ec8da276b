#!/usr/bin/env bash
# Prepares the source vectors; --help explains.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../common/environment.sh"
exec "$PYTHON" -m recipes glove_reconstruction preprocess "$@"
