"""The Dockerfile, scripts/install.sh and running the image; `make image-test` builds it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from docker.slim import required
from recipes.translation.train import Machines, read_machines

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"


@dataclass
class Stage:
    """One stage of the build, with pairs such as ("RUN", "apt-get update") in order."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        """The arguments of every instruction of one kind."""
        return [text for word, text in self.instructions if word == keyword]


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with continued lines joined, without comments."""
    lines = (DOCKER / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(keyword, rest) for keyword, rest in pairs]


def stages() -> dict[str, Stage]:
    """The stages by name, in order."""
    by_name: dict[str, Stage] = {}
    for keyword, text in instructions():
        if keyword == "FROM":
            base, word, name = text.split()
            assert word == "AS"
            by_name[name] = Stage(base, name)
        elif by_name:
            list(by_name.values())[-1].instructions.append((keyword, text))
    return by_name


def ancestry(name: str) -> list[Stage]:
    """A stage and its base stages, the first one first."""
    all_stages = stages()
    line = [all_stages[name]]
    while line[0].base in all_stages:
        line.insert(0, all_stages[line[0].base])
    return line


def without_mounts(command: str) -> str:
    """A RUN instruction as a shell command, without the options of RUN itself."""
    return re.sub(r"^(--\S+\s+)+", "", command)


def write_program(path: Path, body: str) -> None:
    """Write a stand-in for a command as a shell script."""
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


STEPS = ["installer", "packages", "torch", "opennmt", "project"]
FINAL = ["train", "server"]
BUILD_TOOLS = r"\b(gcc|g\+\+|make|cmake|build-essential|python3-dev|python3-venv|git|curl|wget|devel)\b"


def test_steps_match_the_setup_in_order() -> None:
    taken: list[str] = []
    for command in stages()["build"].all("RUN"):
        for call in re.findall(r"scripts/install\.sh /opt/venv/bin/python((?: [a-z]+)+)", command):
            taken += call.split()
    assert taken == STEPS
    # An ARG is in the environment of the steps after it, where scripts/install.sh reads it.
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert text.index("ARG TORCH_BUILD=") < text.index("install.sh /opt/venv/bin/python torch opennmt")
    install = (ROOT / "scripts" / "install.sh").read_text(encoding="utf-8")
    assert f"steps=({' '.join(STEPS)})" in install
    setup = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    assert 'scripts/install.sh "$venv/bin/python"\n' in setup


@pytest.mark.parametrize("name", FINAL)
def test_user_entry_point_and_volumes(name: str) -> None:
    """The user is numeric and unprivileged, and only the build stage has the tools."""

    def all_of(keyword: str) -> list[str]:
        return [text for stage in ancestry(name) for text in stage.all(keyword)]

    user, made = all_of("USER")[-1].split(":"), " ".join(all_of("RUN"))
    assert all(number.isdecimal() and int(number) >= 10000 for number in user)
    assert f"useradd --uid {user[0]} " in made
    assert not re.search(BUILD_TOOLS, re.sub(r"--mount=\S+|\$\{COMPILER:\+.*?\}", "", made))
    (entry,), (environment,), (volumes,) = all_of("ENTRYPOINT"), all_of("ENV"), all_of("VOLUME")
    path = ROOT / Path(json.loads(entry)[-1]).relative_to("/opt/shared-embeddings")
    assert path.is_file() and os.access(path, os.X_OK)
    assert {"DATA_DIR=/data", "RUNS=/runs"} <= set(environment.split())
    assert json.loads(volumes) == ["/data", "/runs"]
    (label,) = stages()["base"].all("LABEL")
    (version,) = re.findall(r'org.opencontainers.image.version="([^"]*)"', label)
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_copied_files_are_not_ignored() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in allowed)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert packages | {"requirements", "scripts", "docker", "pyproject.toml", "README.md"} <= allowed
    for text in stages()["build"].all("COPY"):
        source = text.split()[0]
        assert source == "." or source.split("/")[0] in allowed


def test_image_has_what_the_commands_need() -> None:
    packages = required(["shared-embeddings[all]"])
    assert {"shared-embeddings", "torch", "sympy", "transformers", "huggingface-hub", "gensim"} <= packages
    assert not packages & {"mypy", "pytest", "mkdocs-material", "ipykernel"}


SCRIPT = ROOT / "scripts" / "install.sh"
HASHED = "install --quiet --no-deps --require-hashes"
CALLS = {
    "installer": f"{HASHED} --requirement requirements/installer.txt",
    "packages": f"{HASHED} --no-build-isolation --requirement requirements/pins.txt",
    "torch": "install --requirement requirements/torch.txt",
    "opennmt": f"{HASHED} --requirement requirements/opennmt.txt",
    "project": "install --quiet --no-deps --no-build-isolation --editable .",
}


def install(
    folder: Path, *steps: str, failing: str = "pip show torch", build: str = ""
) -> tuple[list[str], int, str]:
    """The arguments of pip, the exit code, and stderr; `failing` is the call that fails."""
    python = folder / "python"
    python.write_text(
        "#!/bin/bash\n"
        f'[ "$PWD" = "{ROOT}" ] || exit 9\n'
        f'echo "$@" >>"{folder}/calls"\n'
        f'[[ "$*" != *"{failing.removeprefix("pip ")}"* ]]\n'
    )
    python.chmod(0o755)
    command = ["bash", str(SCRIPT), str(python), *steps]
    environment = {**os.environ, "TORCH_BUILD": build}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    lines = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    prefix = "-m pip --disable-pip-version-check "
    assert all(line.startswith(prefix) for line in lines)
    calls = [line.removeprefix(prefix) for line in lines]
    return [call for call in calls if call.startswith("install")], result.returncode, result.stderr


def test_steps_of_the_installation(tmp_path: Path) -> None:
    def fresh(name: str, *steps: str, **options: str) -> tuple[list[str], int, str]:
        (tmp_path / name).mkdir()
        return install(tmp_path / name, *steps, **options)

    assert fresh("all") == (list(CALLS.values()), 0, "")
    assert fresh("two", "torch", "project") == ([CALLS["torch"], CALLS["project"]], 0, "")
    # An installed torch is checked silently; another build is from its own index.
    silent = CALLS["torch"].replace("install", "install --quiet", 1)
    assert fresh("installed", "torch", failing="nothing") == ([silent], 0, "")
    pin = (ROOT / "requirements" / "torch.txt").read_text().splitlines()[-1]
    built = f"install --extra-index-url https://download.pytorch.org/whl/cu128 {pin}+cu128"
    assert fresh("build", "torch", build="cu128") == ([built], 0, "")
    calls, status, _ = fresh("failing", failing="requirements/opennmt.txt")
    assert status == 1 and calls[3:] == [CALLS["opennmt"]]
    calls, status, error = fresh("unknown", "pytorch")
    assert (calls, status) == ([], 2)
    assert error == "set-up: no step 'pytorch'; expected installer, packages, torch, opennmt or project\n"


RECIPE = "recipes/ptb_awd_lstm/train.sh"
TRANSLATION_RECIPE = "recipes/multi30k_ende/train.sh"


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with commands that print their arguments; python reports 4 GPUs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("onmt_train", "onmt_translate"):
        write_program(folder / name, f'echo {name} "$@"; exit 3')
    write_program(folder / "python", 'if [ "$1" = -c ]; then echo 4; else echo python "$@"; fi')
    return folder


def enter(commands: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Call the entry point with the stand-ins first in PATH, from outside the repository."""
    environment = {"PATH": f"{commands}:/usr/bin:/bin", "VIRTUAL_ENV": str(commands.parent), **variables}
    command = [str(DOCKER / "entrypoint.sh"), *arguments]
    return subprocess.run(command, cwd=commands.parent, env=environment, capture_output=True, text=True)


def test_command_replaces_the_shell(commands: Path) -> None:
    """A signal to the container must reach the program, without a shell in between."""
    write_program(commands / "show", "echo $$")
    environment = {"PATH": f"{commands}:/usr/bin:/bin"}
    command = [str(DOCKER / "entrypoint.sh"), "show"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as shell:
        assert int(shell.communicate()[0]) == shell.pid


def test_command_gets_arguments_and_returns_its_exit_code(commands: Path) -> None:
    result = enter(commands, "onmt_translate", "-src", "two words", "*")
    assert (result.stdout, result.returncode) == ("onmt_translate -src two words *\n", 3)


def test_script_of_a_recipe_is_found_from_any_folder(commands: Path) -> None:
    result = enter(commands, RECIPE, "small_funnel", "-epochs", "1")
    assert result.stdout == "python -m recipes ptb_awd_lstm train small_funnel -epochs 1\n"


@pytest.mark.parametrize("arguments", [[], ["help"], ["--help"]])
def test_help(commands: Path, arguments: list[str]) -> None:
    result = enter(commands, *arguments)
    assert result.returncode == 0
    assert RECIPE in result.stdout and "onmt_translate" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["onmt_tranlsate"], "unknown command 'onmt_tranlsate'; 'help' lists"),
        (["distributed", "onmt_translate"], "'onmt_translate' does not train in several processes"),
        (["distributed", "recipes/ptb/train.sh"], "there is no recipes/ptb/train.sh"),
    ],
)
def test_user_errors_are_one_line(commands: Path, arguments: list[str], words: str) -> None:
    result = enter(commands, *arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert words in line


def test_all_gpus_of_one_machine(commands: Path) -> None:
    result = enter(commands, "distributed", "onmt_train", "-config", "a.yaml")
    assert result.returncode == 3
    assert result.stdout == (
        "onmt_train -config a.yaml -world_size 4 -gpu_ranks 0 1 2 3 -master_ip localhost -master_port 29500\n"
    )


def test_each_machine_has_its_own_ranks(commands: Path) -> None:
    seen: list[int] = []
    for node in range(3):
        where = {"NODES": "3", "NODE_RANK": str(node), "GPUS_PER_NODE": "2", "MASTER_ADDR": "a"}
        words = enter(commands, "distributed", "onmt_train", **where).stdout.split()
        assert words[words.index("-world_size") + 1] == "6"
        assert words[words.index("-master_ip") + 1] == "a"
        ranks = words[words.index("-gpu_ranks") + 1 : words.index("-master_ip")]
        seen += [int(rank) for rank in ranks]
    assert seen == list(range(6))


def test_language_models_use_torchrun(commands: Path) -> None:
    where = {"NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    launcher = (
        "python -m lm.train.launch --nnodes 2 --node-rank 1 --nproc-per-node 4 "
        "--master-addr a --master-port 7 -m "
    )
    result = enter(commands, "distributed", "lm_train", "-config", "a.yaml", **where)
    assert result.stdout == f"{launcher}lm.train.command -config a.yaml\n"
    result = enter(commands, "distributed", RECIPE, "small_funnel", **where)
    assert result.stdout == f"{launcher}recipes ptb_awd_lstm train small_funnel\n"


def test_recipes_of_translation_models(commands: Path) -> None:
    """Those of published models run on several machines."""
    where = {"NODES": "2", "NODE_RANK": "1", "GPUS_PER_NODE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    result = enter(commands, "distributed", "recipes/wmt14_ende/train.sh", "row", "-seed", "3", **where)
    words = result.stdout.split()
    assert words[:6] == ["python", "-m", "recipes", "wmt14_ende", "train", "row"]
    machines, rest = read_machines(words[6:], gpus=9)
    assert machines == Machines(4, 2, 1, "a", 7) and rest == ["-seed", "3"]
    result = enter(commands, "distributed", TRANSLATION_RECIPE, "funnel", GPUS_PER_NODE="2")
    wanted = "python -m recipes multi30k_ende train funnel -world_size 2 -gpu_ranks 0 1 "
    assert result.stdout.startswith(wanted)
    result = enter(commands, "distributed", TRANSLATION_RECIPE, "funnel", NODES="2", MASTER_ADDR="a")
    assert result.returncode == 2
    assert "trains on one machine only" in result.stderr


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"NODES": "two"}, "NODES is 'two'; it must be an integer from 1"),
        (
            {"NODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"},
            "NODE_RANK is '2'; it must be an integer from 0",
        ),
        ({"NODES": "2"}, "MASTER_ADDR must name machine 0"),
        ({"GPUS_PER_NODE": "0"}, "no GPU here; run the image with --gpus all"),
    ],
)
def test_invalid_numbers_fail(commands: Path, variables: dict[str, str], words: str) -> None:
    result = enter(commands, "distributed", "onmt_train", **variables)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert words in line


ENTRY_POINT = DOCKER / "slurm.sbatch"
JOB = yaml.safe_load((DOCKER / "pytorchjob.yaml").read_text(encoding="utf-8"))
REPLICAS = JOB["spec"]["pytorchReplicaSpecs"]
VERSION = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
IMAGE = f"shared-embeddings:{VERSION.group(1) if VERSION else ''}"


def containers() -> list[dict[str, Any]]:
    return [replica["template"]["spec"]["containers"][0] for replica in REPLICAS.values()]


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """A job on two machines with three GPUs each, and stand-ins for the commands of Slurm and Apptainer."""
    write_program(tmp_path / "scontrol", '[ "$*" = "show hostnames node[7-8]" ] && printf "node7\\nnode8\\n"')
    write_program(
        tmp_path / "srun",
        'while [[ $1 == --* ]]; do shift; done; for id in 0 1; do SLURM_NODEID=$id "$@" || exit; done',
    )
    write_program(
        tmp_path / "apptainer",
        'echo "$NODES $NODE_RANK $GPUS_PER_NODE $MASTER_ADDR $MASTER_PORT"; printf "[%s]" "$@"; echo',
    )
    return {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "DATA_DIR": "/shared/my data",
        "RUNS": "/shared/runs",
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_GPUS_ON_NODE": "3",
    }


def submit(
    environment: dict[str, str], *arguments: str, script: Path = ENTRY_POINT
) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_slurm_runs_the_same_command_on_every_machine(cluster: dict[str, str]) -> None:
    result = submit(cluster, "onmt_train", "-embedding", "{method: funnel, rank: 64}")
    assert result.returncode == 0, result.stderr
    first, line, second, same = result.stdout.splitlines()
    assert first == "2 0 3 node7 23456"
    assert second == "2 1 3 node7 23456"
    assert line == same
    words = re.findall(r"\[(.*?)\]", line)
    assert words[:3] == ["run", "--nv", "--no-privs"]
    assert "/shared/my data:/data" in words and "/shared/runs:/runs" in words
    command = ["distributed", "onmt_train", "-embedding", "{method: funnel, rank: 64}"]
    assert words[-5:] == [f"docker://{IMAGE}", *command]


@pytest.mark.parametrize("name", ["DATA_DIR", "RUNS", "SLURM_GPUS_ON_NODE", "no command"])
def test_slurm_names_what_is_missing(cluster: dict[str, str], name: str) -> None:
    cluster.pop(name, None)
    result = submit(cluster, *(["lm_train"] if name != "no command" else []))
    assert result.returncode != 0 and result.stdout == ""
    assert name in result.stderr


def test_tasks_of_an_array_code_their_part_of_a_table(cluster: dict[str, str]) -> None:
    script, words = DOCKER / "large_table.sbatch", ["--model", "/data/model", "--table", "t.*", "--bits", "2"]
    write_program(Path(cluster["PATH"].partition(":")[0]) / "apptainer", 'printf "[%s]" "$@"')
    assert "--array" in submit(cluster, *words, script=script).stderr
    task = {**cluster, "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "16"}
    for variables, part in (({}, "3/16"), ({"SLURM_ARRAY_TASK_COUNT": "1", "PARTS": "16"}, "3/16")):
        result = submit({**task, **variables}, *words, script=script)
        assert result.returncode == 0, result.stderr
        command = re.findall(r"\[(.*?)\]", result.stdout)
        assert command[-11:] == [f"docker://{IMAGE}", "shared-embeddings", "compress", *words, "--part", part]


def test_pods_of_an_indexed_job_code_their_part_of_a_table(tmp_path: Path) -> None:
    spec = yaml.safe_load((DOCKER / "large_table.yaml").read_text(encoding="utf-8"))["spec"]
    [container] = spec["template"]["spec"]["containers"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == 16
    script, *words = container["args"]
    write_program(tmp_path / "entry", 'printf "[%s]" "$@"')
    script = script.replace("/opt/shared-embeddings/docker/entrypoint.sh", str(tmp_path / "entry"))
    environment = {"PATH": "/usr/bin:/bin", "JOB_COMPLETION_INDEX": "5"}
    result = subprocess.run(["bash", "-c", script, *words], env=environment, capture_output=True, text=True)
    command = re.findall(r"\[(.*?)\]", result.stdout)
    assert command[:4] == ["shared-embeddings", "compress", "--part", "5/16"]
    assert command[4:] == words[1:] and "ple.shard_*.weight" in command


def test_all_files_use_one_image() -> None:
    for path in [*DOCKER.iterdir(), ROOT / "README.md"]:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        assert ":latest" not in text, path
        for tag in re.findall(r"shared-embeddings:([\w.-]+)", text):
            assert tag.removesuffix("-server") == IMAGE.split(":")[1], path
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    (name,) = {container["image"] for container in containers()}
    assert name == IMAGE
    assert services["train"]["image"] == f"${{IMAGE:-{name}}}"
    assert f"image=${{IMAGE:-{name}}}" in ENTRY_POINT.read_text(encoding="utf-8")
    assert f"-t {name} ." in (DOCKER / "README.md").read_text(encoding="utf-8")
    assert services["server"]["image"] == f"${{SERVER_IMAGE:-{name}-server}}"


def test_pytorchjob_counts_its_machines_and_has_the_port_of_the_entry_point() -> None:
    machines = sum(replica["replicas"] for replica in REPLICAS.values())
    default = re.search(r"MASTER_PORT:-(\d+)", (DOCKER / "distributed.sh").read_text(encoding="utf-8"))
    assert default
    for container in containers():
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        assert environment["NODES"] == str(machines)
        assert environment["GPUS_PER_NODE"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
        # The operator takes the rendezvous' port from the one of these names.
        assert container["name"] == "pytorch"
        assert container["ports"] == [{"name": "pytorchjob-port", "containerPort": int(default.group(1))}]


def test_pytorchjob_gives_each_machine_its_number(tmp_path: Path) -> None:
    write_program(tmp_path / "entrypoint.sh", 'echo "$NODE_RANK"; printf "[%s]" "$@"')
    container = containers()[1]
    start = container["command"].index("bash")
    command = [*container["command"][start:], *container["args"]]
    line = [word.replace("/opt/shared-embeddings/docker", str(tmp_path)) for word in command]
    environment = {"PATH": "/usr/bin:/bin", "RANK": "1"}
    printed = subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed == "1\n[distributed][recipes/ptb_awd_lstm/train.sh][small_funnel]"


FILE = DOCKER / "compose.yaml"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))["services"]  # type: ignore[no-any-return]


def test_services_have_folders_and_no_privileges(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service["cap_drop"] == ["ALL"] and "cap_add" not in service
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["user"] and not service.get("privileged", False)
        mounts = {mount["target"]: mount for mount in service["volumes"]}
        assert {"/data", "/runs"} <= set(mounts) or set(mounts) == {"/etc/nginx/nginx.conf"}
        # Docker would create a missing folder as root, and training could not write to it.
        assert all(mount["bind"] == {"create_host_path": False} for mount in mounts.values())


def test_the_server_answers_where_the_health_check_asks(services: dict[str, Any]) -> None:
    (exposed,) = stages()["server"].all("EXPOSE")
    assert "ports" not in services["server"]  # only nginx reaches it
    (port,) = services["nginx"]["ports"]
    nginx = (DOCKER / "nginx.conf").read_text(encoding="utf-8")
    assert f"proxy_pass http://server:{exposed};" in nginx and f"listen {port.split(':')[-1]};" in nginx
    assert f"127.0.0.1:{exposed}/translator" in (DOCKER / "health.py").read_text(encoding="utf-8")
    (start,) = stages()["server"].all("CMD")
    command = services["server"]["command"]
    assert [*command[:-1], command[-1].removeprefix("${MODEL_CONFIG:-").removesuffix("}")] == json.loads(
        start
    )


def test_docker_compose_reads_it(tmp_path: Path) -> None:
    try:
        subprocess.run(["docker", "compose", "version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no docker compose here")
    command = ["docker", "compose", "-f", str(FILE), "config", "--format", "json"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    assert json.loads(printed.stdout)["services"]["train"]["shm_size"] == str(16 * 2**30)


@contextmanager
def server(answer: bytes) -> Iterator[str]:
    """A server with one answer at the health address of onmt_server, and 404 elsewhere."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/translator/health" else 404)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    running = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/translator"
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


def check(address: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(DOCKER / "health.py")]
    environment = {**os.environ, "SERVER_URL": address, "no_proxy": "127.0.0.1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b'{"status": "ok"}', None),
        (b'{"status": "error"}', "status error"),
        (b"{}", "not an answer of onmt_server"),
        (b"<html>", "Expecting value"),
        (None, "refused"),
    ],
)
def test_health_of_a_server(answer: bytes | None, words: str | None) -> None:
    """With one line if it is not healthy, or not there."""
    with server(answer or b"") as address:
        result = check(address)
    if answer is None:
        result = check(address)
    if words is None:
        assert (result.returncode, result.stderr) == (0, "")
        return
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(address) and words in line
