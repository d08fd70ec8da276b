#!/usr/bin/env bash
# Starts this machine's processes of a training run on all GPUs of one or several machines; see `distributed.sh help`.
set -euo pipefail
project=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
    cat <<TEXT
usage: distributed COMMAND [argument ...]

COMMAND is one of
  recipes/NAME/train.sh ROW   of language models and of published translation models: on all machines;
                              of other translation models: on one machine
  lm_train, onmt_train        on all machines

Run the same line on every machine, with these variables:
  NODES           number of machines (default 1)
  NODE_RANK       number of this machine: 0 to NODES - 1 (default 0)
  GPUS_PER_NODE   processes per machine (default: the number of GPUs of this machine)
  MASTER_ADDR     name or address of machine 0 (default localhost)
  MASTER_PORT     a free port there (default 29500)
TEXT
}

fail() {
    echo "distributed: $*" >&2
    exit 2
}

# check_integer NAME VALUE LEAST MOST
check_integer() {
    if ! [[ $2 =~ ^(0|[1-9][0-9]{0,5})$ ]] || (($2 < $3 || $2 > $4)); then
        fail "$1 is '$2'; it must be an integer from $3 to $4"
    fi
}

case ${1:-help} in
    help | -h | --help)
        usage
        exit
        ;;
esac

nodes=${NODES:-1}
node_rank=${NODE_RANK:-0}
master=${MASTER_ADDR:-localhost}
port=${MASTER_PORT:-29500}
gpus=${GPUS_PER_NODE:-$(python -c 'import torch; print(torch.cuda.device_count())')}
[ "$gpus" != 0 ] || fail "no GPU here; run the image with --gpus all, or set GPUS_PER_NODE to a number of processes"
check_integer NODES "$nodes" 1 9999
check_integer NODE_RANK "$node_rank" 0 $((nodes - 1))
check_integer GPUS_PER_NODE "$gpus" 1 999
check_integer MASTER_PORT "$port" 1 65535
[ "$nodes" = 1 ] || [ -n "${MASTER_ADDR:-}" ] || fail "NODES is $nodes; MASTER_ADDR must name machine 0"

torchrun="--nnodes $nodes --node-rank $node_rank --nproc-per-node $gpus --master-addr $master --master-port $port"
read -ra torchrun_options <<<"$torchrun"
# OpenNMT starts its own processes; each machine gets its own ranks.
mapfile -t ranks < <(seq $((node_rank * gpus)) $((node_rank * gpus + gpus - 1)))
onmt_options=(-world_size $((nodes * gpus)) -gpu_ranks "${ranks[@]}" -master_ip "$master" -master_port "$port")

case $1 in
    onmt_train) exec onmt_train "${@:2}" "${onmt_options[@]}" ;;
    lm_train) exec python -m lm.train.launch "${torchrun_options[@]}" -m lm.train.command "${@:2}" ;;
    recipes/*/train.sh)
        [ -f "$project/$1" ] || fail "there is no $1; there are $(cd "$project" && echo recipes/*/train.sh)"
        if grep -q TORCHRUN "$project/$1"; then
            TORCHRUN=$torchrun exec "$project/$1" "${@:2}"
        elif grep -q -- --machines "$project/$1"; then
            exec "$project/$1" "${@:2}" --gpus "$gpus" --machines "$nodes" --machine "$node_rank" \
                --address "$master" --port "$port"
        fi
        [ "$nodes" = 1 ] || fail "$1 trains on one machine only; on several use onmt_train with its configuration"
        exec "$project/$1" "${@:2}" "${onmt_options[@]}"
        ;;
    *) fail "'$1' does not train in several processes; give recipes/NAME/train.sh, lm_train or onmt_train" ;;
esac
