"""The scripts for clusters: one image, one port, and the line that each machine of a job runs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.image import DOCKER, ROOT, stages

SCRIPT = DOCKER / "slurm.sbatch"
JOB = yaml.safe_load((DOCKER / "pytorchjob.yaml").read_text(encoding="utf-8"))
REPLICAS = JOB["spec"]["pytorchReplicaSpecs"]
VERSION = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
IMAGE = f"shared-embeddings:{VERSION.group(1) if VERSION else ''}"


def containers() -> list[dict[str, Any]]:
    return [replica["template"]["spec"]["containers"][0] for replica in REPLICAS.values()]


def write(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """A job on two machines with three GPUs each, and stand-ins for the commands of Slurm and Apptainer."""
    write(tmp_path / "scontrol", '[ "$*" = "show hostnames node[7-8]" ] && printf "node7\\nnode8\\n"')
    write(
        tmp_path / "srun",
        'while [[ $1 == --* ]]; do shift; done; for id in 0 1; do SLURM_NODEID=$id "$@" || exit; done',
    )
    write(
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


def test_slurm_runs_the_same_line_on_every_machine(cluster: dict[str, str]) -> None:
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
def test_slurm_takes_files_and_addresses_as_they_are(cluster: dict[str, str], image: str) -> None:
    assert f"[{image}][distributed]" in submit({**cluster, "IMAGE": image}, "lm_train").stdout


@pytest.mark.parametrize("name", ["DATA_DIR", "RUNS", "SLURM_GPUS_ON_NODE"])
def test_slurm_says_what_is_missing(cluster: dict[str, str], name: str) -> None:
    del cluster[name]
    result = submit(cluster, "lm_train")
    assert result.returncode != 0 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert name in line


def test_slurm_wants_a_command(cluster: dict[str, str]) -> None:
    result = submit(cluster)
    assert result.returncode == 2
    assert "no command" in result.stderr


def test_slurm_starts_one_task_on_each_machine() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert "#SBATCH --ntasks-per-node=1\n" in text
    assert "srun --ntasks-per-node=1 --kill-on-bad-exit=1" in text


def test_one_image_everywhere() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    (name,) = {container["image"] for container in containers()}
    assert name == IMAGE
    assert services["train"]["image"] == f"${{IMAGE:-{name}}}"
    assert f"image=${{IMAGE:-{name}}}" in SCRIPT.read_text(encoding="utf-8")
    assert f"-t {name} ." in (DOCKER / "README.md").read_text(encoding="utf-8")
    assert services["server"]["image"] == f"${{SERVER_IMAGE:-{name}-server}}"


def test_every_mention_of_the_image_has_its_version() -> None:
    for path in [*DOCKER.iterdir(), ROOT / "README.md"]:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        assert ":latest" not in text, path
        for tag in re.findall(r"shared-embeddings:([\w.-]+)", text):
            assert tag.removesuffix("-server") == IMAGE.split(":")[1], path


def test_pytorchjob_counts_its_machines() -> None:
    assert (JOB["apiVersion"], JOB["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert list(REPLICAS) == ["Master", "Worker"]
    machines = sum(replica["replicas"] for replica in REPLICAS.values())
    for container in containers():
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        assert environment["NODES"] == str(machines)
        assert environment["GPUS_PER_NODE"] == str(container["resources"]["limits"]["nvidia.com/gpu"])


def test_pytorchjob_uses_the_port_of_the_entry_point() -> None:
    default = re.search(r"MASTER_PORT:-(\d+)", (DOCKER / "distributed.sh").read_text(encoding="utf-8"))
    assert default
    for container in containers():
        # The operator takes the rendezvous' port from the one of these names.
        assert container["name"] == "pytorch"
        assert container["ports"] == [{"name": "pytorchjob-port", "containerPort": int(default.group(1))}]


def test_pytorchjob_has_volumes_shared_memory_and_no_rights_but_those_of_an_ordinary_user() -> None:
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
    write(tmp_path / "entrypoint.sh", 'echo "$NODE_RANK"; printf "[%s]" "$@"')
    container = containers()[1]
    start = container["command"].index("bash")
    command = [*container["command"][start:], *container["args"]]
    line = [word.replace("/opt/shared-embeddings/docker", str(tmp_path)) for word in command]
    environment = {"PATH": "/usr/bin:/bin", "RANK": "1"}
    printed = subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed == "1\n[distributed][recipes/ptb_awd_lstm/train.sh][small_funnel]"
