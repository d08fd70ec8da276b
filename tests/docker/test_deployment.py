"""Running the image: clusters, docker compose, and the health check of the server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.image import DOCKER, ROOT, instructions, stages, write_program

SCRIPT = DOCKER / "slurm.sbatch"
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


def submit(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *arguments]
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


@pytest.mark.parametrize("image", ["/images/a.sif", "docker-daemon://a:latest"])
def test_slurm_passes_files_and_addresses_unchanged(cluster: dict[str, str], image: str) -> None:
    assert f"[{image}][distributed]" in submit({**cluster, "IMAGE": image}, "lm_train").stdout


@pytest.mark.parametrize("name", ["DATA_DIR", "RUNS", "SLURM_GPUS_ON_NODE", "no command"])
def test_slurm_names_what_is_missing(cluster: dict[str, str], name: str) -> None:
    cluster.pop(name, None)
    result = submit(cluster, *(["lm_train"] if name != "no command" else []))
    assert result.returncode != 0 and result.stdout == ""
    assert name in result.stderr


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
    assert f"image=${{IMAGE:-{name}}}" in SCRIPT.read_text(encoding="utf-8")
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


def test_pytorchjob_has_volumes_shared_memory_and_no_privileges() -> None:
    (user,) = stages()["base"].all("USER")
    for replica in REPLICAS.values():
        pod = replica["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            rights = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            assert container["securityContext"] == rights
        assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" == user
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert set(mounts) == {"/data", "/runs", "/dev/shm"}
        assert set(mounts.values()) == set(volumes)
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


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
        assert {"/data", "/runs"} <= set(mounts)
        # Docker would create a missing folder as root, and training could not write to it.
        assert all(mount["bind"] == {"create_host_path": False} for mount in mounts.values())


def test_builds_are_stages_and_arguments_of_the_image(services: dict[str, Any]) -> None:
    arguments = dict(text.split("=", 1) for keyword, text in instructions() if keyword == "ARG")
    built = {name: service["build"] for name, service in services.items() if "build" in service}
    assert {name: build["target"] for name, build in built.items()} == {"train": "train", "server": "server"}
    for build in built.values():
        assert build["target"] in stages()
        assert (DOCKER / build["context"] / build["dockerfile"]).resolve() == DOCKER / "Dockerfile"
        for name, value in build["args"].items():
            assert value == f"${{{name}:-{arguments[name]}}}"


def test_the_server_answers_where_the_health_check_asks(services: dict[str, Any]) -> None:
    (exposed,) = stages()["server"].all("EXPOSE")
    (port,) = services["server"]["ports"]
    assert port.endswith(f":{exposed}")
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
