#!/usr/bin/env bash
# Resolve requirements/pins.in for every supported Python; write installer.txt, pins.txt and light.txt in requirements/.
# With --keep, only what is new in the .in files is resolved and all other pins stay.
# Every package has the SHA-256 of its files for all platforms; pip rejects other files.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet uv

# resolve FILE OPTION ...: packages for requirements/FILE.in with their hashes, in $work/FILE.txt
resolve() {
    "$work/venv/bin/uv" pip compile --quiet --universal --python-version 3.10 --constraint requirements/torch.txt \
        --generate-hashes --no-annotate --no-header "${@:2}" --output-file "$work/$1.txt" "requirements/$1.in"
}
cat requirements/installer.txt requirements/pins.txt >"$work/pins.txt" # versions that uv prefers
if [[ ${1:-} == --keep ]]; then resolve pins; else resolve pins --upgrade; fi
resolve light --constraint "$work/pins.txt"

# blocks FILE PATTERN: packages whose line matches, with their hashes; !PATTERN: all others
blocks() {
    awk -v pattern="${2#!}" -v inverted="$([[ $2 == !* ]] && echo 1 || echo 0)" \
        '/^[^ #]/ { keep = ($0 ~ pattern) != inverted } keep' "$work/$1.txt"
}

installer='^(pip|setuptools)=='
# torch has a separate file and its own dependencies on CUDA libraries (CPU builds have none).
elsewhere='^(torch|triton|pip|setuptools|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)=='
head="# Made by scripts/update_pins.sh; do not edit."
(echo "$head" && blocks pins "$installer") >requirements/installer.txt.tmp
for file in pins light; do
    (echo "$head" && blocks $file "!$elsewhere") >requirements/$file.txt.tmp
done
for file in installer pins light; do
    mv requirements/$file.txt.tmp requirements/$file.txt
done
echo "requirements/pins.txt: $(grep -c == requirements/pins.txt) packages pinned"
