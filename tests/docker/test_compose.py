"""docker/compose.yaml: what NCCL needs, the volumes, and that it agrees with the image."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.image import DOCKER, instructions, stages

FILE = DOCKER / "compose.yaml"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))["services"]  # type: ignore[no-any-return]


def test_services(services: dict[str, Any]) -> None:
    assert list(services) == ["train", "server", "tensorboard"]


def test_services_have_no_rights_but_those_of_an_ordinary_user(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service["cap_drop"] == ["ALL"] and "cap_add" not in service
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["user"] and not service.get("privileged", False)


def test_training_has_all_gpus_and_what_nccl_needs(services: dict[str, Any]) -> None:
    train = services["train"]
    (device,) = train["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert train["shm_size"] == "16gb"
    assert train["ulimits"]["memlock"] == -1
    assert train["ulimits"]["stack"] == 64 * 2**20


def test_every_service_has_data_and_runs(services: dict[str, Any]) -> None:
    for service in services.values():
        mounts = {mount["target"]: mount for mount in service["volumes"]}
        assert mounts["/data"]["source"] == "${DATA_DIR:-../data}"
        assert mounts["/runs"]["source"] == "${RUNS:-../runs}"
        # Docker would make a missing folder for root, and training could not write into it.
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


def test_tensorboard_is_reachable(services: dict[str, Any]) -> None:
    command = services["tensorboard"]["command"]
    (port,) = services["tensorboard"]["ports"]
    assert "--bind_all" in command
    assert port.endswith(f":{command[command.index('--port') + 1]}")


def test_docker_compose_reads_it(tmp_path: Path) -> None:
    try:
        subprocess.run(["docker", "compose", "version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no docker compose here")
    command = ["docker", "compose", "-f", str(FILE), "config", "--format", "json"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    assert json.loads(printed.stdout)["services"]["train"]["shm_size"] == str(16 * 2**30)
