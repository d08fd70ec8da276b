#!/usr/bin/env bash
# Resolve requirements/pins.in for every supported Python; write requirements/installer.txt and requirements/pins.txt.
# Every package has the SHA-256 of its files for all platforms; pip rejects other files.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet uv
"$work/venv/bin/uv" pip compile --quiet --upgrade --universal --python-version 3.10 --constraint requirements/torch.txt \
    --generate-hashes --no-annotate --no-header --output-file "$work/resolved.txt" requirements/pins.in

# blocks PATTERN: packages whose line matches, with their hashes; !PATTERN: all others
blocks() {
    awk -v pattern="${1#!}" -v inverted="$([[ $1 == !* ]] && echo 1 || echo 0)" \
        '/^[^ #]/ { keep = ($0 ~ pattern) != inverted } keep' "$work/resolved.txt"
}

installer='^(pip|setuptools)=='
# torch has a separate file and its own dependencies on CUDA libraries (CPU builds have none).
elsewhere='^(torch|triton|pip|setuptools|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)=='
for file in installer.txt pins.txt; do
    echo "# Made by scripts/update_pins.sh from pins.in; do not edit." >"$work/$file"
done
blocks "$installer" >>"$work/installer.txt"
blocks "!$elsewhere" >>"$work/pins.txt"
mv "$work/installer.txt" "$work/pins.txt" requirements/
echo "requirements/pins.txt: $(grep -c == requirements/pins.txt) packages pinned"
