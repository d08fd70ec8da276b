"""Train and evaluate one row of a recipe for translation or headlines.

A training, on any number of GPUs and machines, starts or resumes with ``onmt_train``; then its last
checkpoints are averaged.
"""

from __future__ import annotations

import re
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sacrebleu.metrics import BLEU, CHRF

from recipes.common.recipe import Recipe, Row, parse_row
from recipes.common.results import write_result
from recipes.common.tools import (
    Segment,
    fit_model,
    kept_segments,
    option_value,
    peak_memory_of_children,
    read_json,
    read_lines,
    run_command,
    with_overrides,
    write_json,
    write_yaml,
)
from recipes.translation.subwords import joiner
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import locked, replacing, write_lines

AVERAGED = "model_averaged.pt"
# Settings that may change when a run is resumed.
FREE_TO_CHANGE = ("train_steps", "report_every", "keep_checkpoint")
USAGE = """usage: train.sh ROW [--smoke] [option of onmt_train ...]

Trains ROW in $RUNS/{recipe}/ROW and averages the last checkpoints. Resumes from the latest complete one.
Run preprocess.sh first, and train.sh for the teacher of ROW if it has one. Fitted rows have no options. Uses
a GPU if there is one. With --smoke, trains a tiny network for a few steps on the CPU, in
$RUNS/{recipe}/smoke/ROW, on the data of preprocess.sh --smoke."""
MACHINES_USAGE = """
Rows of papers have these additional options

  --gpus N      GPUs of this machine, one process each (default: all; 0: one process on the CPU)
  --machines M  number of machines with N GPUs each; run the command on each, with $RUNS on shared storage
  --machine I   index of this machine, from 0; machine 0 writes
  --address A   address of machine 0
  --port P      port on machine 0 (default: 10000)

Every step has as many tokens as in the paper: with fewer GPUs, more batches are accumulated."""
EVAL_USAGE = """usage: eval.sh ROW [--smoke] [option of onmt_translate ...]

Translates every test set of ROW with its averaged model, scores the detokenized text with sacreBLEU and
writes a line to $RUNS/{recipe}/results.jsonl. Run train.sh ROW first; use --smoke for both or neither."""


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Return all complete checkpoints ``*_step_N.pt`` in `folder`, sorted by step.

    Checkpoints are zip archives, whose directory is at the end; truncated files are not valid archives.
    """
    checkpoints = {}
    for path in folder.glob("*_step_*.pt"):
        step = re.search(r"_step_(\d+)\.pt$", path.name)
        if step and zipfile.is_zipfile(path):
            checkpoints[int(step[1])] = path
    return dict(sorted(checkpoints.items()))


def train_command(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Train the row of the command line."""
    import torch

    has_papers = any(row.batch for row in recipe.rows.values())
    recipe, row, options = parse_row(recipe, USAGE + (MACHINES_USAGE if has_papers else ""), arguments)
    folder, run = data_folder(recipe, row), recipe.home / row.name
    description = recipe.describe_data(folder)
    data = data_options(folder, description, row)
    if row.fit is not None:
        if options:
            raise UserError(f"{row.name} is fitted, not trained: {options[0]} has no effect; remove it")
        teacher = teacher_model(recipe, row)
        with locked(run / "lock"):
            started = time.time()
            texts = [Path(data["data"]["train"][side]) for side in ("path_src", "path_tgt")]
            how = (row.train.get("seed", 0), run / AVERAGED, row.fit)
            fit_model(teacher, row.embedding, folder / "vocabulary", texts, *how)
            log = {"settings": {"embedding": row.embedding}, "data_checksum": description["checksum"]}
            log |= {"finished": 0, "options": [], "seconds": round(time.time() - started, 1)}
            log |= {"peak_memory_mib": peak_memory_of_children()}
            write_json(run / "training.json", log)
        return
    machine = 0
    if row.batch is not None:
        machines, options = read_machines(options, gpus=torch.cuda.device_count() if has_gpu(recipe) else 0)
        options, machine = with_overrides(machines.options(row.batch), options), machines.machine
    elif has_gpu(recipe):
        data |= {"world_size": 1, "gpu_ranks": [0]}
    row = complete_row(recipe, row)
    if machine:
        join_training(run, row, data, machine, options)
    else:
        train_row(row, run, data, description["checksum"], options)


def has_gpu(recipe: Recipe) -> bool:
    """Return whether the rows of a recipe are trained and evaluated on a GPU."""
    import torch

    return torch.cuda.is_available() and not recipe.is_smoke


def data_folder(recipe: Recipe, row: Row) -> Path:
    """Return the folder of the prepared data of a row."""
    return recipe.data / row.data["pieces"] if row.data else recipe.data


def data_options(folder: Path, description: dict[str, Any], row: Row) -> dict[str, Any]:
    """Return the prepared data of a row as options of ``onmt_train``."""
    languages = {"src": description["source"], "tgt": description["target"]}
    corpora = {
        part: {f"path_{side}": str(folder / f"{name}.{language}") for side, language in languages.items()}
        for part, name in (("train", "train"), ("valid", row.data.get("valid", "valid")))
    }
    # Recipes with several kinds of subwords list their vocabularies.
    listed = description["vocabulary"]
    is_shared = not isinstance(listed, dict) or "vocabulary" in listed
    vocabularies = {
        f"{side}_vocab": str(folder / ("vocabulary" if is_shared else f"vocabulary.{language}"))
        for side, language in languages.items()
    }
    return {"data": corpora, **vocabularies}


def complete_row(recipe: Recipe, row: Row) -> Row:
    """Add the paths of the embedding's files and of the teacher's model to a row."""
    folder = data_folder(recipe, row) if row.data else recipe.home
    row = replace(row, embedding=recipe.with_files(row.embedding, folder))
    if row.distill is None:
        return row
    option = {**row.distill, "teacher": str(teacher_model(recipe, row))}
    return replace(row, train={**row.train, "embedding_distillation": option})


def teacher_model(recipe: Recipe, row: Row) -> Path:
    """Return the model of the row's teacher."""
    model = recipe.home / str(row.teacher) / AVERAGED
    if not model.exists():
        command = recipe.command("train.sh", str(row.teacher))
        raise UserError(f"{row.name} starts from {row.teacher}, which is not trained; run {command}")
    return model


def train_row(
    row: Row,
    run: Path,
    data: dict[str, Any],
    checksum: str,
    options: Sequence[str],
    output: Path | None = None,
) -> None:
    """Train `row` in the folder `run` from its latest complete checkpoint, and average its last checkpoints.

    The folder gets ``train.yaml``, ``train.log``, ``training.json``, checkpoints and the averaged model;
    `options` are further ones of ``onmt_train``. Commands may print to the file `output`.
    """
    settings = {**row.train, "embedding": row.embedding}
    target = option_value(options, "train_steps") or str(row.train["train_steps"])
    folder = run / "checkpoints"
    arguments: list[str | Path] = ["-config", run / "train.yaml", *options]
    with locked(run / "lock"):
        checkpoints = complete_checkpoints(folder)
        log: dict[str, Any] = {"settings": settings, "data_checksum": checksum}
        log |= {"segments": [], "finished": None}
        if checkpoints:
            log.update(read_json(run / "training.json") or {})
        before = {**log["settings"], "data": log["data_checksum"]}
        now = {**settings, "data": checksum}
        changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if changed := [key for key in changed if key not in FREE_TO_CHANGE]:
            raise UserError(
                f"{run}: started with a different {', '.join(changed)}; restore it, or move the folder away"
            )
        paths = {"save_model": str(folder / "model"), "log_file": str(run / "train.log")}
        write_yaml(run / "train.yaml", {**data, **paths, **settings})
        if checkpoints and str(log["finished"]) == target:
            print(f"{run.name}: already trained to step {max(checkpoints)}", flush=True)
        else:
            segments: list[Segment] = []
            first = max(checkpoints, default=0)
            if checkpoints:
                print(f"{run.name}: resuming from step {first}", flush=True)
                arguments += ["-train_from", checkpoints[first]]
                segments = kept_segments(log["segments"], checkpoints[first].stat().st_mtime)
            segment: Segment = {"from_step": first, "started": time.time(), "ended": None}
            log |= {"segments": [*segments, segment], "finished": None, "options": list(options)}
            write_json(run / "training.json", log)
            run_command("onmt_train", arguments, output)
            segment["ended"] = time.time()
            log["finished"] = int(target)
            log["seconds"] = round(sum(part["ended"] - part["started"] for part in log["segments"]), 1)
            log["peak_memory_mib"] = peak_memory_of_children()
            write_json(run / "training.json", log)
        checkpoints = dict([*complete_checkpoints(folder).items()][-row.average :])
        if not checkpoints:
            raise UserError(f"{run}: training wrote no checkpoint; set save_checkpoint_steps in rows.yaml")
        print(f"averaging steps {', '.join(map(str, checkpoints))}", flush=True)
        with replacing(run / AVERAGED) as temporary:
            arguments = ["-models", *checkpoints.values(), "-output", temporary]
            run_command("onmt_average_models", arguments, output)


def join_training(run: Path, row: Row, data: dict[str, Any], machine: int, options: Sequence[str]) -> None:
    """Take part in the training of machine 0, which writes all files, unless it is finished."""
    checkpoints = complete_checkpoints(run / "checkpoints")
    log = read_json(run / "training.json") or {}
    target = option_value(options, "train_steps") or row.train["train_steps"]
    if checkpoints and str(log.get("finished")) == str(target):
        print(f"{row.name}: already trained to step {log['finished']}", flush=True)
        return
    config = run / f"machine_{machine}.yaml"
    paths = {"save_model": str(run / "checkpoints" / "model")}
    write_yaml(config, {**data, **paths, **row.train, "embedding": row.embedding})
    resumed = ["-train_from", str(checkpoints[max(checkpoints)])] if checkpoints else []
    run_command("onmt_train", ["-config", str(config), *options, *resumed])


@dataclass(frozen=True)
class Machines:
    """The machines that train a row, with a process for each GPU, or one on the CPU without GPUs."""

    gpus: int  # per machine
    machines: int = 1
    machine: int = 0  # index of this machine, from 0
    address: str = "localhost"  # of machine 0
    port: int = 10000  # on machine 0

    def options(self, batch: dict[str, Any]) -> list[str]:
        """Return the options of ``onmt_train`` for processes and batches of constant total size."""
        world = max(1, self.gpus * self.machines)
        size, accumulated = batch_size(batch, world)
        options = ["-batch_size", str(size), "-accum_count", str(accumulated), "-accum_steps", "0"]
        if self.gpus:
            first = self.machine * self.gpus
            ranks = [str(rank) for rank in range(first, first + self.gpus)]
            options += ["-world_size", str(world), "-gpu_ranks", *ranks]
        if self.machines > 1:
            options += ["-master_ip", self.address, "-master_port", str(self.port)]
            # They start at different times, and only the first one validates; the default is 60 seconds.
            options += ["-timeout", "1800"]
        return options


def read_machines(arguments: Sequence[str], gpus: int) -> tuple[Machines, list[str]]:
    """Return the machines of a command line, by default with `gpus`, and the options for ``onmt_train``."""
    parser = Parser("train.sh", add_help=False)
    for field in fields(Machines):
        default: Any = gpus if field.name == "gpus" else field.default
        parser.add_argument(f"--{field.name}", type=type(default), default=default)
    known, rest = parser.parse_known_args(list(arguments))
    return Machines(**vars(known)), rest


def batch_size(batch: dict[str, Any], processes: int) -> tuple[int, int]:
    """Return the tokens per process and the number of accumulated batches for a constant total batch size.

    `batch` has ``tokens`` per step (target side) and ``per_gpu``, the maximum per GPU.
    """
    accumulated = -(-batch["tokens"] // (batch["per_gpu"] * processes))
    return round(batch["tokens"] / (accumulated * processes)), accumulated


def eval_command(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Score the row of the command line."""
    evaluate(*parse_row(recipe, EVAL_USAGE, arguments))


def evaluate(recipe: Recipe, row: Row, options: list[str], log: Path | None = None) -> None:
    """Score a row; ``bleu`` and ``chrf`` are of the first test set, and rows of papers list all test sets."""
    run, folder = recipe.home / row.name, data_folder(recipe, row)
    data, training = read_trained(recipe, row)
    join = joiner(data.get("kind", "bpe"), data["target"])
    metrics: dict[str, Any] = {}
    for test in row.data.get("tests", ["test"]):
        speed = translate(recipe, row, folder / f"{test}.{data['source']}", options, f"{test}.pieces", log)
        lines = [join(line) for line in read_lines(run / f"{test}.pieces")]
        write_lines(run / f"{test}.translation", lines)
        text = recipe.data / "text" / f"{test}.{data['target']}"
        references = read_lines(text if text.exists() else recipe.data / "test.reference")
        scores = {**corpus_scores(lines, references, data["target"]), "tokens_per_second": speed}
        metrics = metrics or dict(scores)
        if row.data:
            metrics[test] = scores
        scores_text = f"BLEU {scores['bleu']:.1f}, chrF {scores['chrf']:.1f}, {speed:.0f} tokens/s"
        print(f"{row.name}, {test}: {scores_text}", flush=True)
    write_evaluation(recipe, row, data, training, metrics, options)


def corpus_scores(hypotheses: Sequence[str], references: Sequence[str], language: str = "") -> dict[str, Any]:
    """Score detokenized translations against one detokenized reference each, with sacreBLEU (Post, 2018).

    BLEU is over characters for languages without spaces between words.

    Returns:
        ``bleu`` and ``chrf`` (0 to 100), ``bleu_signature``, ``chrf_signature``, and ``sentences``.
    """
    if len(hypotheses) != len(references) or not references:
        raise UserError(f"{len(hypotheses)} translations for {len(references)} references; translate again")
    scores: dict[str, Any] = {"sentences": len(references)}
    # sacreBLEU's default tokenization would treat a sentence in these languages as one word.
    is_unspaced = re.split("[-_]", language)[0] in ("ja", "th", "zh", "yue", "lo", "km", "my")
    bleu = BLEU(tokenize="char") if is_unspaced else BLEU()
    for name, metric in (("bleu", bleu), ("chrf", CHRF())):
        scores[name] = metric.corpus_score(list(hypotheses), [list(references)]).score
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores


def read_trained(recipe: Recipe, row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the content of ``data.json`` and of ``training.json`` of a trained row."""
    folder, run = data_folder(recipe, row), recipe.home / row.name
    description = recipe.describe_data(folder)
    training = read_json(run / "training.json")
    if not (run / AVERAGED).exists() or not training or training["finished"] is None:
        raise UserError(f"{run}: training is not complete; run {recipe.command('train.sh', row.name)}")
    if training["data_checksum"] != description["checksum"]:
        raise UserError(
            f"{run}: trained on different data than {folder} contains now; move it away and train again"
        )
    return description, training


def write_evaluation(
    recipe: Recipe,
    row: Row,
    data: dict[str, Any],
    training: dict[str, Any],
    metrics: dict[str, Any],
    options: list[str],
) -> None:
    """Write the result of a row: its `metrics` and records of its data and training, see `read_trained`."""
    from nmt.models import describe_checkpoint

    counts = describe_checkpoint(recipe.home / row.name / AVERAGED)
    options_of_model = counts.pop("config")
    # Only the row's options; others are defaults or in train_options.
    used = training["settings"].keys() - {"embedding", "embedding_distillation"}
    train = {name: options_of_model[name] for name in sorted(used) if name in options_of_model}
    of_run = {"train": train, "train_options": training["options"], "eval_options": options}
    settings = {name: value for name, value in row.settings().items() if name != "train"}
    metrics = {**metrics, "training_seconds": training["seconds"]}
    log = recipe.home / row.name / "train.log"
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    if perplexities := re.findall(r"Validation perplexity: ([\d.]+)", text):
        metrics["valid_perplexity"] = min(map(float, perplexities))
    memory = {"training": training["peak_memory_mib"], "translation": peak_memory_of_children()}
    write_result(
        recipe.home,
        row.name,
        config={**settings, **{name: value for name, value in of_run.items() if value}},
        counts=counts,
        metrics=metrics,
        data_checksum=data["checksum"],
        peak_memory_mib=memory,
    )


def translate(
    recipe: Recipe, row: Row, source: Path, options: list[str], output: str, printed: Path | None = None
) -> float:
    """Translate `source` into the file `output` of the run; return tokens per second without loading."""
    run = recipe.home / row.name
    log = run / "translate.log"
    log.unlink(missing_ok=True)
    reporting = {"report_time": True, "log_file": str(log), "gpu": 0 if has_gpu(recipe) else -1}
    write_yaml(run / "translate.yaml", {**row.translate, **reporting})
    with replacing(run / output) as temporary:
        arguments: list[str | Path] = ["-config", run / "translate.yaml", "-model", run / AVERAGED]
        arguments += ["-transforms", "none"]  # the data are tokenized
        arguments += ["-src", source, "-output", temporary]
        run_command("onmt_translate", with_overrides(arguments, options), printed)
    speeds = re.findall(r"Tokens per second: ([\d.]+)", log.read_text(encoding="utf-8"))
    if not speeds:
        raise UserError(f"{log}: onmt_translate reported no speed; do not set report_time and log_file")
    return float(speeds[-1])
