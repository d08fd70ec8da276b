#!/usr/bin/env bash
# Resolve requirements/pins.in anew for every supported Python and write requirements/pins.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet uv
"$work/venv/bin/uv" pip compile --quiet --upgrade --universal --python-version 3.10 --constraint requirements/torch.txt \
    --no-annotate --no-header --output-file "$work/resolved.txt" requirements/pins.in

# torch has a file of its own, and names its CUDA libraries itself (a CPU build has none).
{
    echo "# Made by scripts/update_pins.sh from pins.in; do not edit."
    grep -vE '^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==' "$work/resolved.txt"
} >"$work/pins.txt"
mv "$work/pins.txt" requirements/pins.txt
echo "requirements/pins.txt: $(grep -c == requirements/pins.txt) packages pinned"
