"""The image's entry point and `distributed`, with stand-ins for the commands that they start."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from recipes.translation.train import Machines, read_machines
from tests.docker.image import DOCKER, write_program

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
        (["-src"], "unknown command '-src'"),
        (["recipes/ptb/train.sh"], "there is no recipes/ptb/train.sh; there are recipes/agnews"),
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
        "python -m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 4 "
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
        ({"GPUS_PER_NODE": "h100:8"}, "GPUS_PER_NODE is 'h100:8'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
    ],
)
def test_invalid_numbers_fail(commands: Path, variables: dict[str, str], words: str) -> None:
    result = enter(commands, "distributed", "onmt_train", **variables)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert words in line
