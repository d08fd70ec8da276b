"""Training curves: what is read from logs and event files, and the picture of several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.__main__ import main
from recipes.common.curves import BLEU, LOSS, PERPLEXITY, read_curves, short_names, validation_curve
from recipes.common.tools import run_main

LM_LOG = """Training starts: 2,000 tokens per epoch
step 100 epoch 0.05 loss 8.018075 ppl 3035.33 lr 19.97 | 1,748 tokens/s, 38:52 left
step 200 epoch 0.10 loss 7.235545 ppl 1387.90 lr 19.89 | 2,963 tokens/s, 30:08 left
step 200 valid loss 5.572150 ppl 263.00 (the best so far)
step 300 epoch 0.10 loss nan ppl nan lr 19.89 | 2,963 tokens/s, 30:08 left
"""
NMT_LOG = """[2026 INFO] Step 50/  100; acc: 9.1; ppl: 320.1; xent: 5.8; lr: 0.00003; 5 sec; BLEU: 1.5
[2026 INFO] Validation perplexity: 30.5
[2026 INFO] Step 100/  100; acc: 12.2; ppl: 55.0; xent: 4.0; lr: 0.00003; 20/19 tok/s; 9 sec;
[2026 INFO] Validation perplexity: 20
[2026 INFO] Step 50/  100; acc: 9.1; ppl: 320.1; xent: 5.7; lr: 0.00003; 20/19 tok/s; 5 sec;
[2026 INFO] Validation perplexity: 29.5
[2026 INFO] Validation perplexity: broken
"""


def run_of(folder: Path, log: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "train.log").write_text(log)
    return folder


def write_events(folder: Path, values: dict[str, dict[int, float]]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder))
    for tag, points in values.items():
        for step, value in points.items():
            writer.add_scalar(tag, value, step)
    writer.close()


def test_log_of_a_language_model(tmp_path: Path) -> None:
    found = read_curves(run_of(tmp_path / "run", LM_LOG))
    assert found[LOSS][:2] == [(100, 8.018075), (200, 7.235545)] and found[LOSS][2][0] == 300
    assert found[PERPLEXITY] == [(200, 263.0)]
    assert read_curves(tmp_path / "run" / "train.log").keys() == found.keys()


def test_log_of_a_translator_that_was_resumed(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", NMT_LOG)
    curve = [(50, 29.5), (100, 20.0)]
    assert read_curves(run) == {LOSS: [(50, 5.7), (100, 4.0)], PERPLEXITY: curve, BLEU: [(50, 1.5)]}
    assert validation_curve(run) == curve
    assert validation_curve(tmp_path / "nowhere") == []


def test_event_files_of_both_hosts(tmp_path: Path) -> None:
    write_events(
        tmp_path / "lm" / "tensorboard", {"valid/perplexity": {10: 80.0, 20: 40.0}, "train/rate": {1: 1}}
    )
    write_events(tmp_path / "nmt" / "Nov-24", {"valid/ppl": {10: 80.0}, "valid/BLEU": {10: 2.5}})
    write_events(tmp_path / "nmt" / "Nov-25", {"progress/xent": {5: 4.0}, "valid/ppl": {20: 40.0}})
    assert validation_curve(tmp_path / "lm") == [(10, 80.0), (20, 40.0)]
    assert read_curves(tmp_path / "nmt") == {
        PERPLEXITY: [(10, 80.0), (20, 40.0)],
        BLEU: [(10, 2.5)],
        LOSS: [(5, 4.0)],
    }


def test_runs_have_the_shortest_names_that_differ() -> None:
    assert short_names([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert short_names([Path("/a/x/run")]) == ["run"]


def test_several_runs_are_drawn_into_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(run_of(tmp_path / "one", LM_LOG)), str(run_of(tmp_path / "two", NMT_LOG))]
    picture = tmp_path / "curves.png"
    arguments = ["plot", *runs, "--output", str(picture)]
    assert run_main("plot", main, arguments) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{picture}\n"
    assert run_main("plot", main, arguments) == 2
    assert "--force" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run_main("plot", main, ["plot", str(tmp_path / "empty"), "--output", str(tmp_path / "x.png")]) == 2
    assert "empty: no train.log" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
