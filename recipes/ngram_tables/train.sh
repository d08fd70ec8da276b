#!/usr/bin/env bash
# Trains one row of the table; --help explains. TORCHRUN, such as "--standalone --nproc-per-node 2", has several
# processes train together.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../common/environment.sh"
# shellcheck disable=SC2086  # several options
exec "$PYTHON" ${TORCHRUN:+-m torch.distributed.run $TORCHRUN} -m recipes ngram_tables train "$@"
