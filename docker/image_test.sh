#!/usr/bin/env bash
# Build the image and run what docker/README.md promises without GPUs, as another user: `make image-test`.
# TORCH_BUILD selects the build of torch, as in the Dockerfile (default: cpu; empty: the one for CUDA).
# ENGINE=docker (the default if its daemon runs) builds on ubuntu:24.04. ENGINE=podman needs root and Debian or Ubuntu with
# the packages mmdebstrap, buildah, podman and runc: the base image is made from the host's apt sources, and the build has
# the host's pip configuration; no registry of images is needed. KEEP=1 keeps the images and files in WORK (10 GB).
set -Eeuo pipefail
cd "$(dirname "$0")/.."

work=${WORK:-$(mktemp -d "${TMPDIR:-/var/tmp}/image-test.XXXXXX")}
mkdir -p "$work/runs" "$work/data"
work=$(cd "$work" && pwd)
if [ -z "${ENGINE:-}" ]; then
    if docker info >/dev/null 2>&1; then ENGINE=docker; else ENGINE=podman; fi
fi
image=localhost/image-test
torch_build=${TORCH_BUILD-cpu}
network=none
SECONDS=0

say() {
    printf 'image-test: %d:%02d %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"
}

fail() {
    echo "image-test: $*" >&2
    exit 1
}

clean() {
    "${engine[@]}" rm --force image-test >/dev/null 2>&1 || true
    [ -z "${KEEP:-}" ] || return 0
    if [ "$ENGINE" = podman ]; then
        buildah rm --all >/dev/null 2>&1 || true
        buildah rmi --all --force >/dev/null 2>&1 || true
        # Nothing below a folder that is still mounted may be removed.
        awk -v below="$work/" 'index($2, below) == 1 { print $2 }' /proc/self/mounts | sort --reverse |
            xargs --no-run-if-empty umount || return 0
    else
        docker image rm --force $image $image-server >/dev/null 2>&1 || true
    fi
    rm -rf --one-file-system "$work"
}

# The host's settings for pip, with the files and folders that they name.
pip_volumes() {
    python3 -m pip config list | sed -n "s/^[^ =]*\.\([a-z-]*\)='\(.*\)'$/\1 = \2/p" | sed 's/\\n/ /g' |
        awk 'BEGIN { print "[global]" } !seen[$1]++' >"$work/pip.conf"
    # apt replaces /etc/ssl/certs of the image, so it must not be a mount.
    local certificates
    certificates=$(sed -n 's/^cert = //p' "$work/pip.conf")
    if [ -n "$certificates" ]; then
        cp "$certificates" "$work/certificates.pem"
        sed -i 's|^cert = .*|cert = /etc/pip.pem|' "$work/pip.conf"
        echo --volume "$work/certificates.pem:/etc/pip.pem:ro"
    fi
    local path
    # shellcheck disable=SC2013  # several in a line
    for path in $(grep -oE '(^| |//)/[^ ]+' "$work/pip.conf" | sed 's|^//||' | sort -u); do
        path=${path%/simple} # an index of files links to its neighbors
        [ ! -e "$path" ] || echo --volume "$path:$path:ro"
    done
    echo --volume "$work/pip.conf:/etc/pip.conf:ro"
}

# A minimal system of the host's release, from the distribution's own repositories.
base_image() {
    # shellcheck disable=SC2016  # for apt to expand
    local distribution release format='deb $(REPO_URI) $(RELEASE) $(COMPONENT)'
    # shellcheck disable=SC1091
    distribution=$(. /etc/os-release && echo "${ID^}") release=$(. /etc/os-release && echo "$VERSION_CODENAME")
    apt-get indextargets --format "$format" "Created-By: Packages" "Origin: $distribution" |
        sort -u >"$work/sources.list"
    apt-config dump Acquire::http Acquire::https Acquire::Check-Valid-Until Acquire::Check-Date >"$work/apt.conf"
    [ -f "$work/base.tar" ] || mmdebstrap --quiet --mode=root --variant=minbase --aptopt="$work/apt.conf" \
        "$release" "$work/base.tar" - <"$work/sources.list"
    podman import --quiet "$work/base.tar" localhost/image-test-base >/dev/null
}

# build TARGET TAG
build() {
    say "building the target $1"
    if [ "$ENGINE" = docker ]; then
        docker build --quiet --file docker/Dockerfile --target "$1" --tag "$2" \
            --build-arg TORCH_BUILD="$torch_build" . >/dev/null
    else
        buildah bud --quiet --layers --isolation chroot --format docker "${volumes[@]}" \
            --file docker/Dockerfile --target "$1" --tag "$2" \
            --build-arg BASE_IMAGE=localhost/image-test-base --build-arg TORCH_BUILD="$torch_build" . >"$work/build.log" 2>&1 ||
            fail "the build failed:"$'\n'"$(tail -n 30 "$work/build.log")"
    fi
}

# run [option of docker run ...] IMAGE [argument ...]: as the README's function, without GPUs
run() {
    "${engine[@]}" run "${limits[@]}" --network "$network" --shm-size 1g --cap-drop ALL --security-opt no-new-privileges \
        --user "$user" -v "$work/data:/data" -v "$work/runs:/runs" "$@"
}

# start [...]: the same, in the background
start() {
    run --detach --name image-test "$@" >/dev/null
}

finish() {
    "${engine[@]}" rm --force image-test >/dev/null
}

# wait_for WORDS COMMAND ...: until it succeeds
wait_for() {
    local second
    for second in $(seq 600); do
        if "${@:2}" >/dev/null 2>&1; then return 0; fi
        [ "$("${engine[@]}" inspect --format '{{.State.Running}}' image-test)" = true ] || break
        sleep 1
    done
    "${engine[@]}" logs image-test 2>&1 | tail -n 20
    fail "after $second tries: $1"
}

# stop FILE: end the container by SIGTERM; it must exit with 143 after saving FILE_step_*.pt
stop() {
    local started=$SECONDS status
    "${engine[@]}" stop -t 120 image-test >/dev/null
    status=$("${engine[@]}" inspect --format '{{.State.ExitCode}}' image-test)
    [ "$status" = 143 ] || fail "status $status after SIGTERM: $("${engine[@]}" logs image-test 2>&1 | tail -n 20)"
    finish
    compgen -G "$work/runs/$1_step_*.pt" >/dev/null || fail "nothing was saved after SIGTERM"
    [ ! -e "$work/runs/$1_step_3000.pt" ] || fail "the training was done before it was stopped"
    say "stopped with status 143 within $((SECONDS - started)) s, saved $(cd "$work/runs" && echo "$1"_step_*.pt)"
}

# quiet COMMAND ...: show its output only if it fails
quiet() {
    "$@" >"$work/log" 2>&1 || fail "$*"$'\n'"$(tail -n 20 "$work/log")"
}

expect_file() {
    [ -s "$work/runs/$1" ] || fail "there is no $1 in /runs"
    [ "$(stat -c %u:%g "$work/runs/$1")" = "$user" ] || fail "$1 does not belong to $user"
}

volumes=()
limits=()
engine=(docker)
user=$(id -u):$(id -g)
if [ "$ENGINE" = podman ]; then
    [ "$(id -u)" = 0 ] || fail "ENGINE=podman needs root"
    for program in mmdebstrap buildah podman runc; do
        command -v $program >/dev/null || fail "no '$program' here: apt install mmdebstrap buildah podman runc"
    done
    engine=(podman --cgroup-manager cgroupfs --events-backend file --runtime runc)
    # podman's own limits need a capability that containers and sandboxes lack, its health checks need systemd.
    limits=(--ulimit nofile=4096 --ulimit nproc=4096 --no-healthcheck)
    printf '[storage]\ndriver = "overlay"\ngraphroot = "%s"\nrunroot = "%s"\n' \
        "$work/storage" "$work/run" >"$work/storage.conf"
    export CONTAINERS_STORAGE_CONF=$work/storage.conf TMPDIR=$work
fi
if [ "$(id -u)" = 0 ]; then
    user=12345:12345
    chown $user "$work/runs" "$work/data"
    chmod 755 "$work"
fi
trap clean EXIT

if [ "$ENGINE" = podman ]; then
    say "base image"
    base_image
    read -ra volumes <<<"$(pip_volumes | tr '\n' ' ')"
fi
build train $image
build server $image-server
say "$("${engine[@]}" image inspect --format '{{.Size}}' $image | awk '{ printf "%.2f GB", $1 / 1e9 }')"

say "help, and a wrong command"
run --rm $image >"$work/log"
grep -q recipes/ptb_awd_lstm/train.sh "$work/log" || fail "help does not list the recipes"
status=0
run --rm $image onmt_tranlsate 2>/dev/null || status=$?
[ $status = 2 ] || fail "a wrong command ends with $status"

say "a recipe with one process and with two"
recipe=recipes/ptb_awd_lstm
quiet run --rm $image $recipe/preprocess.sh --smoke
quiet run --rm $image $recipe/train.sh small_standard --smoke
quiet run --rm $image $recipe/eval.sh small_standard --smoke
quiet run --rm -e GPUS_PER_NODE=2 $image distributed $recipe/train.sh small_funnel --smoke
for row in small_standard small_funnel; do
    expect_file "ptb_awd_lstm/smoke/$row/best.pt"
done

say "onmt_build_vocab; onmt_train, SIGTERM, and the same command again"
for split in train valid; do
    awk 'BEGIN { srand(7); for (line = 0; line < 200; line++) { text = ""
        for (word = 0; word < 5; word++) text = text " w" int(40 * rand())
        print substr(text, 2) } }' >"$work/data/$split.src"
    tr w v <"$work/data/$split.src" >"$work/data/$split.tgt"
done
cat >"$work/data/model.yaml" <<'YAML'
data:
  corpus: {path_src: /data/train.src, path_tgt: /data/train.tgt, weight: 1}
  valid: {path_src: /data/valid.src, path_tgt: /data/valid.tgt}
src_vocab: model.vocab
share_vocab: true
share_embeddings: true
share_decoder_embeddings: true
save_data: model
encoder_type: transformer
decoder_type: transformer
position_encoding: true
layers: 1
heads: 2
hidden_size: 32
word_vec_size: 32
transformer_ff: 64
optim: adam
learning_rate: 0.003
batch_size: 32
batch_type: sents
num_workers: 0
gpu_backend: gloo
train_steps: 3000
save_checkpoint_steps: 3000
valid_steps: 3000
report_every: 10
tensorboard: true
tensorboard_log_dir: tensorboard
YAML
quiet run --rm $image onmt_build_vocab -config /data/model.yaml -n_sample -1
train=(onmt_train -config /data/model.yaml -save_model)
makes_steps() {
    "${engine[@]}" logs image-test 2>&1 | grep "Step 20/"
}
start $image "${train[@]}" model
wait_for "onmt_train makes no steps" makes_steps
stop model
quiet run --rm $image "${train[@]}" model
! grep -q "Step 10/" "$work/log" || fail "onmt_train did not resume"
expect_file model_step_3000.pt

say "onmt_train with two processes, SIGTERM; with two containers"
start -e GPUS_PER_NODE=2 $image distributed "${train[@]}" two
wait_for "two processes make no steps" makes_steps
stop two
machines=(-e NODES=2 -e GPUS_PER_NODE=1 -e MASTER_ADDR=localhost)
start "${machines[@]}" $image distributed "${train[@]}" pair -train_steps 40
network=container:image-test quiet run --rm "${machines[@]}" -e NODE_RANK=1 $image \
    distributed "${train[@]}" pair -train_steps 40
status=$("${engine[@]}" wait image-test)
[ "$status" = 0 ] || fail "the first container ends with $status: $("${engine[@]}" logs image-test 2>&1 | tail -n 20)"
makes_steps >/dev/null || fail "the first container made no steps"
finish
expect_file pair_step_40.pt

say "onmt_translate, and the model with compressed embeddings"
quiet run --rm $image shared-embeddings compress --method projective --rank 8 --model model_step_3000.pt --output small.pt
for model in model_step_3000.pt small.pt; do
    rm -f "$work/runs/translation"
    quiet run --rm $image onmt_translate -model /runs/$model -src /data/valid.src -output /runs/translation
    expect_file translation
    [ "$(wc -l <"$work/runs/translation")" = 200 ] || fail "$model does not translate every line"
done

say "the server: health, token, translation"
echo '{"models_root": "/runs", "models": [{"id": 100, "model": "model_step_3000.pt", "load": true, "opt": {}}]}' \
    >"$work/runs/server.json"
start -e ONMT_SERVER_TOKEN=secret $image-server
wait_for "onmt_server is not healthy" "${engine[@]}" exec image-test python /opt/shared-embeddings/docker/health.py
ask() {
    "${engine[@]}" exec -i image-test python - "$@" <<'PYTHON'
import sys
import urllib.error
import urllib.request

request = urllib.request.Request("http://127.0.0.1:5000/translator/translate", b'[{"src": "w1 w2 w3", "id": 100}]')
request.add_header("Authorization", f"Bearer {sys.argv[1]}")
try:
    print(urllib.request.urlopen(request).read().decode())
except urllib.error.HTTPError as error:
    print(error.code)
PYTHON
}
[ "$(ask wrong)" = 401 ] || fail "the server answers with a wrong token: $(ask wrong)"
[[ $(ask secret) == *tgt* ]] || fail "the server does not translate: $(ask secret)"
quiet "${engine[@]}" stop -t 60 image-test
finish

say "TensorBoard"
start $image tensorboard --logdir /runs --bind_all --port 6006
wait_for "TensorBoard shows no training of onmt_train" "${engine[@]}" exec image-test python -c \
    "from urllib.request import urlopen; assert 'tensorboard/' in urlopen('http://127.0.0.1:6006/data/runs').read().decode()"
finish

say "passed"
