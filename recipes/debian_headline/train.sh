#!/usr/bin/env bash
# Trains one row of the table; --help explains.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../common/environment.sh"
exec "$PYTHON" -m recipes debian_headline train "$@"
