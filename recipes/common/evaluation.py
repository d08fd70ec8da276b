"""Evaluating one row: translate, put the text together again, score, and write the results down."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from recipes.common.bleu import corpus_scores
from recipes.common.config import Row, write_yaml
from recipes.common.corpus import read_lines, write_lines
from recipes.common.errors import UserError
from recipes.common.moses import Tokenizer
from recipes.common.recipe import Recipe
from recipes.common.results import write_results
from recipes.common.subwords import join
from recipes.common.tools import run_tool, with_overrides
from recipes.common.training import AVERAGED, peak_memory_of_children, read_json
from shared_embeddings.utils.files import replacing, write_text


class Trained(NamedTuple):
    """A row that is trained to the end.

    Attributes:
        data: the content of ``data.json``.
        training: the content of ``training.json``.
    """

    data: dict[str, Any]
    training: dict[str, Any]


def evaluate_row(recipe: Recipe, row: Row, options: list[str]) -> Path:
    """Score the averaged model of a row on the recipe's test set; returns the results file.

    Args:
        recipe: whose row it is.
        row: what was trained; its folder gets the translations and ``results.json``.
        options: further options of ``onmt_translate``, as on its command line.

    Raises:
        UserError: the row is not trained, or not on these data, or they are not prepared.
    """
    run, data = recipe.home / row.name, recipe.data
    trained = read_trained(recipe, row, data)
    speed = translate(row, run, data / f"test.{trained.data['source']}", options)
    tokenizer = Tokenizer(trained.data["target"])
    lines = [tokenizer.detokenize(join(line)) for line in read_lines(run / "test.subwords")]
    write_lines(run / "test.translation", lines)
    scores = corpus_scores(lines, read_lines(data / "test.reference"))
    write_evaluation(recipe.name, row, run, trained, {**scores, "tokens_per_second": speed}, options)
    print(f"{row.name}: BLEU {scores['bleu']:.1f}, chrF {scores['chrf']:.1f}, {speed:.0f} tokens/s")
    return run / "results.json"


def read_trained(recipe: Recipe, row: Row, data: Path) -> Trained:
    """What is known about a trained row of `recipe` and its data, which lie in the folder `data`.

    Raises:
        UserError: the row is not trained, or not on these data, or they are not prepared.
    """
    description = read_json(data / "data.json")
    if description is None:
        raise UserError(f"{data}: no prepared data; run {recipe.command('preprocess.sh')}")
    run = recipe.home / row.name
    training = read_json(run / "training.json")
    if not (run / AVERAGED).exists() or not training or training["finished"] is None:
        raise UserError(f"{run}: not trained to the end; run {recipe.command('train.sh', row.name)}")
    if training.get("data_checksum", description["checksum"]) != description["checksum"]:
        raise UserError(f"{run}: trained on other data than {data} holds now; move it away and train again")
    return Trained(description, training)


def write_evaluation(
    recipe: str, row: Row, run: Path, trained: Trained, metrics: dict[str, Any], options: list[str]
) -> None:
    """Write ``results.json`` of a row: its `metrics`, and what is known about its training."""
    from nmt import describe_checkpoint

    checkpoint = describe_checkpoint(run / AVERAGED)
    config = {
        **asdict(row),
        "train": checkpoint.pop("config"),
        "train_options": trained.training["options"],
        "translate_options": options,
    }
    memory = {
        "training": trained.training["peak_memory_mib"],
        "translation": peak_memory_of_children(),
    }
    write_results(
        run / "results.json",
        recipe=recipe,
        row=row.name,
        config=config,
        counts=checkpoint,
        metrics={**metrics, "training_seconds": trained.training["seconds"]},
        data_checksum=trained.data["checksum"],
        paper=row.paper,
        peak_memory_mib=memory,
    )


def translate(row: Row, run: Path, source: Path, options: list[str], output: str = "test.subwords") -> float:
    """Translate `source` into the file `output` of `run`; returns tokens per second, loading not counted."""
    log = run / "translate.log"
    log.unlink(missing_ok=True)
    write_text(
        run / "translate.yaml", write_yaml({**row.translate, "report_time": True, "log_file": str(log)})
    )
    with replacing(run / output) as temporary:
        arguments: list[str | Path] = ["-config", run / "translate.yaml", "-model", run / AVERAGED]
        arguments += ["-transforms", "none"]  # the data are in tokens
        run_tool(
            "onmt_translate", with_overrides([*arguments, "-src", source, "-output", temporary], options)
        )
    found = re.findall(r"Tokens per second: ([\d.]+)", log.read_text(encoding="utf-8"))
    if not found:
        raise UserError(
            f"{log}: onmt_translate reported no speed; leave report_time and log_file as they are"
        )
    return float(found[-1])
