# Sourced by the recipes' scripts: finds the repository and its Python, wherever the script is called from.
# Sets REPOSITORY, RUNS, PYTHON; leaves DATA_DIR as it is.

REPOSITORY=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
RUNS=${RUNS:-$REPOSITORY/runs}

if [[ -n ${VIRTUAL_ENV:-} && -x $VIRTUAL_ENV/bin/python ]]; then
    PYTHON=$VIRTUAL_ENV/bin/python
elif [[ -x $REPOSITORY/.venv/bin/python ]]; then
    PYTHON=$REPOSITORY/.venv/bin/python
else
    echo "$(basename -- "$0"): no Python environment; run 'make setup' in $REPOSITORY or activate one" >&2
    exit 2
fi

# The caller's directory stays the working directory, so that relative paths mean what they say.
export PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}
export RUNS
