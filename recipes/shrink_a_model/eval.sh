#!/usr/bin/env bash
# Measures the models and writes the table and the picture of the README; --help explains.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../common/environment.sh"
exec "$PYTHON" -m recipes shrink_a_model eval "$@"
