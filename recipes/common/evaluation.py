"""Evaluating one row: translate, put the text together again, score, and write the results down."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from recipes.common.bleu import corpus_scores
from recipes.common.config import Row, write_yaml
from recipes.common.corpus import read_lines, write_lines
from recipes.common.errors import UserError
from recipes.common.moses import Tokenizer
from recipes.common.results import write_results
from recipes.common.subwords import join
from recipes.common.tools import run_tool
from recipes.common.training import AVERAGED, peak_memory_of_children, read_json
from shared_embeddings.files import replacing, write_text


def evaluate_row(recipe: str, row: Row, run: Path, data: Path, options: list[str]) -> Path:
    """Score the averaged model in `run` on the test set in `data`; returns the results file.

    Args:
        recipe: name of the recipe.
        row: what was trained.
        run: its folder; gets the translations and ``results.json``.
        data: folder of the prepared data, with ``data.json``.
        options: further options of ``onmt_translate``, as on its command line.

    Raises:
        UserError: the row is not trained, or not on these data, or they are not prepared.
    """
    from nmt import describe_checkpoint

    description = read_json(data / "data.json")
    if description is None:
        raise UserError(f"{data}: no prepared data; run preprocess.sh")
    training = read_json(run / "training.json")
    model = run / AVERAGED
    if not model.exists() or not training or training["finished"] is None:
        raise UserError(f"{run}: not trained to the end; run train.sh {row.name}")
    if training.get("data_checksum", description["checksum"]) != description["checksum"]:
        raise UserError(f"{run}: trained on other data than {data} holds now; move it away and train again")
    speed = translate(row, run, data / f"test.{description['source']}", options)
    tokenizer = Tokenizer(description["target"])
    lines = [tokenizer.detokenize(join(line)) for line in read_lines(run / "test.subwords")]
    write_lines(run / "test.translation", lines)
    scores = corpus_scores(lines, read_lines(data / "test.reference"))
    checkpoint = describe_checkpoint(model)
    trained = checkpoint.pop("config")
    config = {
        **asdict(row),
        "train": trained,
        "train_options": training["options"],
        "translate_options": options,
    }
    write_results(
        run / "results.json",
        recipe=recipe,
        row=row.name,
        config=config,
        counts=checkpoint,
        metrics={**scores, "tokens_per_second": speed, "training_seconds": training["seconds"]},
        data_checksum=description["checksum"],
        peak_memory_mib={"training": training["peak_memory_mib"], "translation": peak_memory_of_children()},
    )
    print(f"{row.name}: BLEU {scores['bleu']:.1f}, chrF {scores['chrf']:.1f}, {speed:.0f} tokens/s")
    return run / "results.json"


def translate(row: Row, run: Path, source: Path, options: list[str]) -> float:
    """Translate `source` into ``test.subwords``; returns the tokens per second, loading not counted."""
    log = run / "translate.log"
    log.unlink(missing_ok=True)
    write_text(
        run / "translate.yaml", write_yaml({**row.translate, "report_time": True, "log_file": str(log)})
    )
    with replacing(run / "test.subwords") as temporary:
        arguments: list[str | Path] = ["-config", run / "translate.yaml", "-model", run / AVERAGED]
        run_tool("onmt_translate", [*arguments, "-src", source, "-output", temporary, *options])
    found = re.findall(r"Tokens per second: ([\d.]+)", log.read_text(encoding="utf-8"))
    if not found:
        raise UserError(
            f"{log}: onmt_translate reported no speed; leave report_time and log_file as they are"
        )
    return float(found[-1])
