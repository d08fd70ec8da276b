# Sourced by the recipes' scripts: finds the repository and its Python from any working directory.
# Sets REPOSITORY, RUNS and PYTHON; DATA_DIR is unchanged.

REPOSITORY=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
RUNS=${RUNS:-$REPOSITORY/runs}

# The first Python with this project beside it: PYTHON, of the active environment, on the PATH, of `make setup`.
for candidate in "${PYTHON:-}" "${VIRTUAL_ENV:-}/bin/python" python "$REPOSITORY/.venv/bin/python" ""; do
    PYTHON=$(command -v -- "$candidate") && [[ -x $(dirname -- "$PYTHON")/onmt_train ]] && break
done
if [[ -z $PYTHON ]]; then
    echo "$(basename -- "$0"): no onmt_train beside PYTHON, in VIRTUAL_ENV, on the PATH or in .venv;" \
        "run 'make setup' in $REPOSITORY" >&2
    exit 2
fi

# The working directory is unchanged, so that relative paths work.
export PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}
export RUNS
