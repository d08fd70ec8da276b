#!/usr/bin/env bash
# Prepares the data; --help explains.
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/../common/wikitext103.sh" wikitext103_lstm "$@"
