"""Translate and score the test sets of one row of a translation recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sacrebleu.metrics import BLEU, CHRF

from recipes.common.corpus import read_lines, write_lines
from recipes.common.recipe import Recipe, parse_row
from recipes.common.results import write_result
from recipes.common.rows import Row
from recipes.common.tools import peak_memory_of_children, read_json, run_tool, with_overrides, write_yaml
from recipes.translation.subwords import joiner
from recipes.translation.train import AVERAGED, data_folder
from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import replacing


def corpus_scores(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Score detokenized translations against one detokenized reference each, with sacreBLEU (Post, 2018).

    Returns:
        ``bleu`` and ``chrf`` (0 to 100), ``bleu_signature``, ``chrf_signature``, and ``sentences``.

    Raises:
        UserError: the sides differ in length or are empty.
    """
    if len(hypotheses) != len(references):
        raise UserError(f"{len(hypotheses)} translations for {len(references)} references; translate again")
    if not references:
        raise UserError("nothing to score: the test set is empty")
    scores: dict[str, Any] = {"sentences": len(references)}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        scores[name] = metric.corpus_score(list(hypotheses), [list(references)]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores


USAGE = """usage: eval.sh ROW [--smoke] [option of onmt_translate ...]

Translates every test set of ROW with its averaged model, scores the detokenized text with sacreBLEU and
writes a line to $RUNS/{recipe}/results.jsonl. Run train.sh ROW first; use --smoke for both or neither."""


class Trained(NamedTuple):
    """A trained row.

    Attributes:
        data: content of ``data.json``.
        training: content of ``training.json``.
    """

    data: dict[str, Any]
    training: dict[str, Any]


def main(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Evaluate the row of the command line."""
    evaluate(*parse_row(recipe, USAGE, arguments))


def evaluate(recipe: Recipe, row: Row, options: list[str]) -> None:
    """Score a row; ``bleu`` and ``chrf`` are those of the first test set; rows of papers list all test sets.

    Raises:
        UserError: the data are not prepared, or the row is not trained on them.
    """
    run, folder = recipe.home / row.name, data_folder(recipe, row)
    trained = read_trained(recipe, row)
    join = joiner(trained.data.get("kind", "bpe"), trained.data["target"])
    metrics: dict[str, Any] = {}
    for test in row.data.get("tests", ["test"]):
        speed = translate(row, run, folder / f"{test}.{trained.data['source']}", options, f"{test}.pieces")
        scores = {
            **_score(run, test, join, _reference(recipe, row, test, trained)),
            "tokens_per_second": speed,
        }
        metrics = metrics or dict(scores)
        if row.data:
            metrics[test] = scores
        scores_text = f"BLEU {scores['bleu']:.1f}, chrF {scores['chrf']:.1f}, {speed:.0f} tokens/s"
        print(f"{row.name}, {test}: {scores_text}", flush=True)
    write_evaluation(recipe, row, trained, metrics, options)


def _reference(recipe: Recipe, row: Row, test: str, trained: Trained) -> Path:
    """Return the file with the reference translations of a test set."""
    return (
        recipe.data / "text" / f"{test}.{trained.data['target']}"
        if row.data
        else recipe.data / "test.reference"
    )


def _score(run: Path, test: str, join: Callable[[str], str], reference: Path) -> dict[str, Any]:
    """Detokenize a translation, write it and score it."""
    lines = [join(line) for line in read_lines(run / f"{test}.pieces")]
    write_lines(run / f"{test}.translation", lines)
    return corpus_scores(lines, read_lines(reference))


def read_trained(recipe: Recipe, row: Row) -> Trained:
    """Read the records of a trained row and its data.

    Raises:
        UserError: the data are not prepared, or the row is not trained on them.
    """
    folder = data_folder(recipe, row)
    description = recipe.describe_data(folder)
    run = recipe.home / row.name
    training = read_json(run / "training.json")
    if not (run / AVERAGED).exists() or not training or training["finished"] is None:
        raise UserError(f"{run}: training is not complete; run {recipe.command('train.sh', row.name)}")
    if training.get("data_checksum", description["checksum"]) != description["checksum"]:
        raise UserError(
            f"{run}: trained on different data than {folder} contains now; move it away and train again"
        )
    return Trained(description, training)


def write_evaluation(
    recipe: Recipe, row: Row, trained: Trained, metrics: dict[str, Any], options: list[str]
) -> None:
    """Write the result of a row: its `metrics` and records of its training."""
    from nmt.checkpoint.models import describe_checkpoint

    run = recipe.home / row.name
    counts = describe_checkpoint(run / AVERAGED)
    options_of_model = counts.pop("config")
    # Only the row's options; others are defaults or in train_options.
    used = trained.training["settings"].keys() - {"embedding", "embedding_distillation"}
    train = {name: options_of_model[name] for name in sorted(used) if name in options_of_model}
    given = {"train": train, "train_options": trained.training["options"], "eval_options": options}
    settings = {name: value for name, value in row.settings().items() if name != "train"}
    write_result(
        recipe.home,
        row.name,
        config={**settings, **{name: value for name, value in given.items() if value}},
        counts=counts,
        metrics={**metrics, "training_seconds": trained.training["seconds"]},
        data_checksum=trained.data["checksum"],
        peak_memory_mib={
            "training": trained.training["peak_memory_mib"],
            "translation": peak_memory_of_children(),
        },
    )


def translate(row: Row, run: Path, source: Path, options: list[str], output: str) -> float:
    """Translate `source` into the file `output` of `run`; return tokens per second without loading."""
    log = run / "translate.log"
    log.unlink(missing_ok=True)
    write_yaml(run / "translate.yaml", {**row.translate, "report_time": True, "log_file": str(log)})
    with replacing(run / output) as temporary:
        arguments: list[str | Path] = ["-config", run / "translate.yaml", "-model", run / AVERAGED]
        arguments += ["-transforms", "none"]  # the data are tokenized
        arguments += ["-src", source, "-output", temporary]
        run_tool("onmt_translate", with_overrides(arguments, options))
    return read_speed(log)


def read_speed(log: Path) -> float:
    """Return the tokens per second in the log of ``onmt_translate``.

    Raises:
        UserError: the log has none.
    """
    found = re.findall(r"Tokens per second: ([\d.]+)", log.read_text(encoding="utf-8"))
    if not found:
        raise UserError(f"{log}: onmt_translate reported no speed; do not set report_time and log_file")
    return float(found[-1])
