#!/usr/bin/env bash
# Makes the corpus, trains and compares the models; --help explains.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../common/environment.sh"
exec "$PYTHON" -m recipes quickstart run "$@"
