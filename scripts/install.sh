#!/usr/bin/env bash
# Install the pinned packages, OpenNMT-py and this project into an environment: the steps of `make setup` and of the images.
# usage: scripts/install.sh PYTHON [STEP ...]     STEP: installer packages torch opennmt project, default: all, in this order
# LIGHT=1 leaves out OpenNMT-py and what only some extras need: requirements/light.txt instead of pins.txt.
# TORCH_BUILD selects a build of torch on download.pytorch.org: cpu, cu128, ... Default: the one of the package index.
# pip's configuration selects the package index; all packages except torch and its CUDA libraries need a known SHA-256.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

python=${1:?"usage: scripts/install.sh PYTHON [STEP ...]"}
shift

pip() {
    "$python" -m pip --disable-pip-version-check "$@"
}

say() {
    echo "set-up: $*"
}

# pip checks hashes only if every package has one; the files list all dependencies.
hashed() {
    pip install --quiet --no-deps --require-hashes "$@"
}

installer() {
    say "1 of 5: pip and setuptools"
    hashed --requirement requirements/installer.txt
}

packages() {
    local file=requirements/pins.txt
    [ -z "${LIGHT:-}" ] || file=requirements/light.txt
    say "2 of 5: $(grep -c == "$file") packages"
    hashed --no-build-isolation --requirement "$file"
}

# After the packages, so that its dependencies are installed and verified.
torch() {
    say "3 of 5: torch (the largest download: 0.2 GB, or 3 GB where the package index has the CUDA build)"
    local quiet=() # a long download shows its progress
    if pip show torch >/dev/null 2>&1; then
        quiet=(--quiet)
    fi
    if [ -z "${TORCH_BUILD:-}" ]; then
        pip install "${quiet[@]}" --requirement requirements/torch.txt
        return
    fi
    pip install "${quiet[@]}" --extra-index-url "https://download.pytorch.org/whl/$TORCH_BUILD" \
        "$(sed -n "s/^torch==.*/&+$TORCH_BUILD/p" requirements/torch.txt)"
}

opennmt() {
    [ -z "${LIGHT:-}" ] || return 0
    say "4 of 5: OpenNMT-py"
    hashed --requirement requirements/opennmt.txt
}

# Last, so that its onmt_* commands replace those of OpenNMT-py.
project() {
    say "5 of 5: this project"
    PYTHONWARNINGS=ignore pip install --quiet --no-deps --no-build-isolation --editable .
}

steps=("$@")
if [ $# = 0 ]; then
    steps=(installer packages torch opennmt project)
fi
for step in "${steps[@]}"; do
    case $step in
        installer | packages | torch | opennmt | project) "$step" ;;
        *)
            echo "set-up: no step '$step'; expected installer, packages, torch, opennmt or project" >&2
            exit 2
            ;;
    esac
done
