#!/usr/bin/env bash
# Set up .venv in the repository root: pinned packages, OpenNMT-py, then this project. Does nothing if it is up to date.
# LIGHT=1 installs what the library and the language models need (see install.sh), KEEP=1 leaves such an environment as it is.
# PYTHON=python3.12 selects the interpreter, TORCH_BUILD=cpu a build of torch (see install.sh); pip's configuration applies.
set -Eeuo pipefail
cd "$(dirname "$0")/.."
# These settings would install packages outside .venv.
unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
# Python compiles what it imports; everything would take another 0.4 GB.
export PIP_COMPILE=0

venv=.venv
stamp=$venv/setup-complete
unfinished=$venv/setup-unfinished

fail() {
    echo "set-up: $*" >&2
    exit 2
}

step() {
    echo "set-up: $*"
}

# Everything the environment depends on; if a line changes, it is updated.
fingerprint() {
    echo "directory $PWD"
    echo "packages ${LIGHT:+light}"
    echo "python $("$venv/bin/python" -c 'import platform; print(platform.python_version())' 2>/dev/null || true)"
    echo "packages" */__init__.py # an editable install maps the packages that existed
    cat requirements/*.txt pyproject.toml scripts/setup.sh scripts/install.sh | cksum
}

check_python() {
    command -v "$python" >/dev/null || fail "no '$python' here; install Python 3.10 to 3.13, or name one: make PYTHON=/path/to/python"
    "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
        fail "'$python' is $("$python" --version 2>&1); Python 3.10 to 3.13 is needed: make PYTHON=/path/to/python"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "'$python' cannot create virtual environments; on Debian and Ubuntu: apt install python$(version "$python")-venv"
}

version() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

# Concurrent runs wait here.
exec 9<scripts/setup.sh
flock --nonblock 9 || { step "waiting for another set-up in this directory" && flock 9; }

python=${PYTHON:-python3}
present=$(version "$venv/bin/python")
wanted=$present # any supported version unless PYTHON is set
if [ -n "${PYTHON:-}" ]; then
    check_python
    wanted=$(version "$python")
fi
if [ -n "${KEEP:-}" ] && grep -qsx "packages light" $stamp; then
    LIGHT=1
fi
export LIGHT=${LIGHT:-}
# A manual reinstallation of OpenNMT-py overwrites this project's commands.
torch_version=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)
if [ -f $stamp ] && [[ $torch_version == *"${TORCH_BUILD:+"+$TORCH_BUILD"}" ]] && [ "$wanted" = "$present" ] && [ "$(cat $stamp)" = "$(fingerprint)" ] &&
    grep -qs "from nmt.cli import" $venv/bin/onmt_train; then
    exit 0
fi

# Updates environments with other pins; recreates broken ones.
if [ -z "$present" ] || [ -f $unfinished ] || [ "$wanted" != "$present" ] ||
    { [ -f $stamp ] && [ "$(head -n 1 $stamp)" != "directory $PWD" ]; } ||
    ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    check_python
    step "creating $venv with $("$python" --version 2>&1)"
    rm -rf $venv
    "$python" -m venv $venv || fail "'$python -m venv' failed, see above"
fi

rm -f $stamp
touch $unfinished
trap 'echo "set-up: failed, see above; the next run starts over" >&2' ERR
scripts/install.sh "$venv/bin/python"

fingerprint >$stamp.tmp
mv $stamp.tmp $stamp
rm -f $unfinished
step "done"
