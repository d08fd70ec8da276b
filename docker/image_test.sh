#!/usr/bin/env bash
# Build the image for CPUs and run what docker/README.md promises, as another user: `make image-test`.
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
            --build-arg BASE_IMAGE=ubuntu:24.04 --build-arg TORCH_BUILD=cpu . >/dev/null
    else
        buildah bud --quiet --layers --isolation chroot --format docker "${volumes[@]}" \
            --file docker/Dockerfile --target "$1" --tag "$2" \
            --build-arg BASE_IMAGE=localhost/image-test-base --build-arg TORCH_BUILD=cpu . >"$work/build.log" 2>&1 ||
            fail "the build failed:"$'\n'"$(tail -n 30 "$work/build.log")"
    fi
}

# run [option of docker run ...] IMAGE [argument ...]: as the README's function, without GPUs
run() {
    "${engine[@]}" run "${limits[@]}" --network none --shm-size 1g --cap-drop ALL --security-opt no-new-privileges \
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
        sleep 1
    done
    "${engine[@]}" logs image-test 2>&1 | tail -n 20
    fail "after $second tries: $1"
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
run --rm $image | grep -q recipes/ptb_awd_lstm/train.sh || fail "help does not list the recipes"
status=0
run --rm $image onmt_tranlsate 2>/dev/null || status=$?
[ $status = 2 ] || fail "a wrong command ends with $status"

say "a recipe with one process and with two"
recipe=recipes/ptb_awd_lstm
for command in "$recipe/preprocess.sh" "$recipe/train.sh small_standard" "$recipe/eval.sh small_standard"; do
    # shellcheck disable=SC2086
    run --rm $image $command --smoke >"$work/log" 2>&1 || fail "$command: $(tail -n 20 "$work/log")"
done
run --rm -e GPUS_PER_NODE=2 $image distributed $recipe/train.sh small_funnel --smoke >"$work/log" 2>&1 ||
    fail "distributed: $(tail -n 20 "$work/log")"
for row in small_standard small_funnel; do
    expect_file "ptb_awd_lstm/smoke/$row/best.pt"
done

say "onmt_build_vocab, onmt_train, SIGTERM, and the same command again"
for split in train valid; do
    awk 'BEGIN { srand(7); for (line = 0; line < 200; line++) { text = ""
        for (word = 0; word < 5; word++) text = text " w" int(40 * rand())
        print substr(text, 2) } }' >"$work/runs/$split.src"
    tr w v <"$work/runs/$split.src" >"$work/runs/$split.tgt"
done
cat >"$work/runs/model.yaml" <<'YAML'
data:
  corpus: {path_src: train.src, path_tgt: train.tgt, weight: 1}
  valid: {path_src: valid.src, path_tgt: valid.tgt}
src_vocab: model.vocab
share_vocab: true
share_embeddings: true
share_decoder_embeddings: true
save_data: model
save_model: model
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
train_steps: 3000
save_checkpoint_steps: 3000
valid_steps: 3000
report_every: 10
YAML
chown -R "$user" "$work/runs"/* 2>/dev/null || true
run --rm $image onmt_build_vocab -config model.yaml -n_sample -1 >"$work/log" 2>&1 || fail "$(tail -n 20 "$work/log")"
start $image onmt_train -config model.yaml
wait_for "onmt_train makes no steps" bash -c '"$@" 2>&1 | grep -q "Step 20/"' bash "${engine[@]}" logs image-test
stopped=$SECONDS
"${engine[@]}" stop -t 60 image-test >/dev/null
status=$("${engine[@]}" inspect --format '{{.State.ExitCode}}' image-test)
[ "$status" = 143 ] || fail "onmt_train ends with $status on SIGTERM: $("${engine[@]}" logs image-test 2>&1 | tail -n 20)"
finish
steps=$(cd "$work/runs" && ls model_step_*.pt)
[[ $steps != *model_step_3000.pt* ]] || fail "onmt_train was done before it was stopped"
say "it saved $steps within $((SECONDS - stopped)) s and ended with 143"
run --rm $image onmt_train -config model.yaml >"$work/log" 2>&1 || fail "$(tail -n 20 "$work/log")"
! grep -q "Step 10/" "$work/log" || fail "onmt_train did not resume"
expect_file model_step_3000.pt

say "onmt_translate, and the model with compressed embeddings"
run --rm $image shared-embeddings compress --method projective --rank 8 --model model_step_3000.pt --output small.pt \
    >"$work/log" 2>&1 || fail "$(tail -n 20 "$work/log")"
for model in model_step_3000.pt small.pt; do
    run --rm $image onmt_translate -model /runs/$model -src valid.src -output /runs/translation >"$work/log" 2>&1 ||
        fail "$(tail -n 20 "$work/log")"
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
"${engine[@]}" stop -t 60 image-test >/dev/null
finish

say "TensorBoard"
start $image tensorboard --logdir /runs --bind_all --port 6006
wait_for "TensorBoard does not answer" "${engine[@]}" exec image-test \
    python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:6006/')"
finish

say "passed"
