#!/usr/bin/env bash
# Scores one trained row; --help explains.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../common/environment.sh"
exec "$PYTHON" -m recipes debian_headline eval "$@"
