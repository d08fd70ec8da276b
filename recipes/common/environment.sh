# Sourced by the recipes' scripts: finds the repository and its Python from any working directory.
# Sets REPOSITORY, RUNS and PYTHON; DATA_DIR is unchanged.

REPOSITORY=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
RUNS=${RUNS:-$REPOSITORY/runs}

# Ignore active environments without this project.
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

# The working directory is unchanged, so that relative paths work.
export PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}
export RUNS
