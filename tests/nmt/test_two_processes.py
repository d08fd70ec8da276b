"""Training with two processes over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nmt.checkpoint.build import build_from_checkpoint
from nmt.checkpoint.checkpoint import read_weights
from nmt.checkpoint.files import read_checkpoint
from tests.nmt.conftest import FUNNEL, SECONDS, WORDS, Host, command, free_port


def train_two(host: Host, folder: Path, **options: Any) -> list[torch.Tensor]:
    """Train in two processes over gloo, from different seeds; gives the parameters of each."""
    script = folder / "worker.py"
    script.write_text(
        "import sys, torch\n"
        "from nmt.patches.table import apply_patches\n"
        "from nmt.train import training\n"
        "from onmt.utils.parse import ArgumentParser\n"
        "import onmt.bin.train, onmt.utils.distributed as distributed\n"
        "rank = int(sys.argv.pop(1))\n"
        "apply_patches()\n"
        "opt = onmt.bin.train._get_parser().parse_args()\n"
        "ArgumentParser.validate_train_opts(opt); ArgumentParser.update_model_opts(opt)\n"
        "opt.seed += rank\n"
        "kept = []\n"
        "import onmt.train_single as single\n"
        "build = single.build_model\n"
        "single.build_model = lambda *a: kept.append(build(*a)) or kept[0]\n"
        "distributed.multi_init(opt, rank)\n"
        "training.run_process(opt, rank)\n"
        "assert not torch.distributed.is_initialized()\n"
        "parts = [p.detach().flatten() for p in kept[0].parameters()]\n"
        f"torch.save(torch.cat(parts), r'{folder}/rank%d' % rank)\n"
    )
    several = {"world_size": 2, "gpu_ranks": [0, 1], "gpu_backend": "gloo", "master_port": free_port()}
    config = host.config("model", embedding=FUNNEL, **several, **options)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "-config", str(config)],
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=SECONDS) for process in processes] == [0, 0]
    return [torch.load(folder / f"rank{rank}", weights_only=True) for rank in range(2)]


@pytest.mark.slow
def test_two_processes_stay_equal(host: Host, tmp_path: Path) -> None:
    one, other = train_two(host, tmp_path, train_steps=3)
    assert torch.equal(one, other)
    states = read_checkpoint(host.folder / "model_step_3.pt")["resume"]
    assert len(states) == 2


@pytest.mark.slow
def test_two_processes_learn_what_one_learns_from_all_their_examples(host: Host, tmp_path: Path) -> None:
    """A step of gradient descent on a whole corpus of 88 examples, no two of them the same."""
    names = sorted(WORDS)
    lines = [[names[place % 20], names[place // 20], names[place % 7]] for place in range(88)]
    host.write("train.src", [" ".join(line) for line in lines])
    host.write("train.tgt", [" ".join(WORDS[word] for word in line) for line in lines])
    descent = {"optim": "sgd", "learning_rate": 0.5, "decay_method": "none", "max_grad_norm": 0}
    options = {**descent, "dropout": [0.0], "attention_dropout": [0.0], "train_steps": 1}

    def whole(examples: int) -> dict[str, Any]:
        return {**options, "batch_type": "sents", "batch_size": 100, "bucket_size": examples}

    one, other = train_two(host, tmp_path, **whole(44))
    alone = host.train("alone", embedding=FUNNEL, **whole(88))
    parameters = build_from_checkpoint(alone)[0].parameters()
    expected = torch.cat([parameter.detach().flatten() for parameter in parameters])
    assert torch.equal(one, other)
    torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_two_processes_stop_early_together(host: Host, tmp_path: Path) -> None:
    """Nothing is learned, so that the second validation ends it."""
    unchanged = {"learning_rate": 1e-30, "decay_method": "none", "warmup_steps": 0}
    one, other = train_two(
        host, tmp_path, **unchanged, early_stopping=1, valid_steps=2, train_steps=50, save_checkpoint_steps=50
    )
    assert torch.equal(one, other)
    assert [path.name for path in host.folder.glob("model_step_*.pt")] == ["model_step_4.pt"]


@pytest.mark.slow
def test_spawned_processes_have_the_patches(host: Host) -> None:
    """The command itself, with two processes: the embedding is there, and resumption finds both positions."""
    options = {
        "embedding": FUNNEL,
        "world_size": 2,
        "gpu_ranks": [0, 1],
        "gpu_backend": "gloo",
        "master_port": free_port(),
    }
    first = host.config("model", **options, train_steps=3)
    subprocess.run(command("train", "-config", str(first)), check=True, timeout=SECONDS)
    again = host.config("model", **{**options, "master_port": free_port()}, train_steps=4)
    checkpoint = str(host.folder / "model_step_3.pt")
    done = subprocess.run(
        command("train", "-config", str(again), "-train_from", checkpoint),
        check=True,
        timeout=SECONDS,
        capture_output=True,
        text=True,
    )
    assert "the data over" not in done.stderr
    _, body, _ = read_weights(str(host.folder / "model_step_4.pt"))
    assert any("emb_luts.0" in name and tensor.shape == (88, 4) for name, tensor in body.items())
