#!/usr/bin/env bash
# Puts the measured cells into the table and the figure of the README; --help explains.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../common/environment.sh"
exec "$PYTHON" -m recipes glove_reconstruction eval "$@"
