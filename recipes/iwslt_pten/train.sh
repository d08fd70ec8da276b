#!/usr/bin/env bash
# Trains one row; --help explains. --machines has several machines train together.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../common/environment.sh"
exec "$PYTHON" -m recipes iwslt_pten train "$@"
