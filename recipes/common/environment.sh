# Sourced by the recipes' scripts: finds the repository and its Python, wherever the script is called from.
# Sets REPOSITORY, RUNS, PYTHON; leaves DATA_DIR as it is.

REPOSITORY=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
RUNS=${RUNS:-$REPOSITORY/runs}

# An active environment that has nothing to do with this project is passed over.
PYTHON=
for environment in "${VIRTUAL_ENV:-}" "$REPOSITORY/.venv"; do
    if [[ -z $PYTHON && -x $environment/bin/python && -x $environment/bin/onmt_train ]]; then
        PYTHON=$environment/bin/python
    fi
done
if [[ -z $PYTHON ]]; then
    echo "$(basename -- "$0"): no Python environment with onmt_train; run 'make setup' in $REPOSITORY" >&2
    exit 2
fi

# The caller's directory stays the working directory, so that relative paths mean what they say.
export PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}
export RUNS
