#!/usr/bin/env bash
# Runs the arguments after the image's name: a script of a recipe, or a command, optionally on all GPUs.
set -euo pipefail
project=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
    cat <<TEXT
usage: docker run [option of docker ...] IMAGE COMMAND [argument ...]

COMMAND is one of
  recipes/NAME/SCRIPT.sh   a script of a recipe: $(cd "$project" && echo recipes/*/train.sh)
  distributed COMMAND ...  training on all GPUs of one or several machines; see 'distributed help'
  onmt_train, onmt_translate, onmt_build_vocab, onmt_server, lm_prepare, lm_train, lm_evaluate, lm_generate,
  shared-embeddings, tensorboard, python, bash and anything else on PATH
  help                     this text

Recipes write to \$RUNS (/runs in the image) and read data from \$DATA_DIR (/data): mount folders there.
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
        command -v -- "$1" >/dev/null || fail "unknown command '$1'; 'help' lists the commands"
        exec "$@"
        ;;
esac
