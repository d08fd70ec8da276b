#!/usr/bin/env bash
# Prepares the data; --help explains.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../common/environment.sh"
exec "$PYTHON" -m recipes debian_headline preprocess "$@"
