#!/usr/bin/env bash
# Runs what stands behind the image's name: a script of a recipe, a command of the environment, or one of both on all GPUs.
set -euo pipefail
project=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
    cat <<TEXT
usage: docker run [option of docker ...] IMAGE COMMAND [argument ...]

COMMAND is one of
  recipes/NAME/SCRIPT.sh   a script of a recipe: $(cd "$project" && echo recipes/*/train.sh)
  distributed COMMAND ...  training on all GPUs of one or several machines; 'distributed help' says more
  onmt_train, onmt_translate, onmt_build_vocab, onmt_server, lm_prepare, lm_train, lm_eval, lm_generate,
  shared-embeddings, tensorboard, python, bash and whatever else is on PATH
  help                     this text

Recipes write below \$RUNS, which is /runs in the image, and look for data in \$DATA_DIR, /data: mount folders there.
TEXT
}

fail() {
    echo "entry point: $*" >&2
    exit 2
}

case ${1:-help} in
    help | -h | --help) usage ;;
    distributed) exec "$project/docker/distributed.sh" "${@:2}" ;;
    recipes/*)
        [ -f "$project/$1" ] || fail "there is no $1; there are $(cd "$project" && echo recipes/*/*.sh)"
        exec "$project/$1" "${@:2}"
        ;;
    *)
        command -v -- "$1" >/dev/null || fail "unknown command '$1'; 'help' lists what there is"
        exec "$@"
        ;;
esac
