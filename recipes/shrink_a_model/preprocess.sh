#!/usr/bin/env bash
# Gets the model and makes the texts and pairs; --help explains.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../common/environment.sh"
exec "$PYTHON" -m recipes shrink_a_model preprocess "$@"
