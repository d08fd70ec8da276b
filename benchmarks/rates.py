"""How well each method learns in one epoch, by optimizer and learning rate.

The models are the rows `small_*` of the recipe ``ptb_awd_lstm`` that are trained from scratch. One epoch is a
sixth of their training; its rate falls to zero along a cosine. Run the recipe's ``preprocess.sh`` first. Runs
that are in the file of results are not repeated.

    OMP_NUM_THREADS=1 python -m benchmarks.rates --jobs 2 --output benchmarks/results.jsonl \\
        --readme benchmarks/README.md
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measuring import Record, earlier_record, markdown, parser_of, publish, save_record
from recipes.common.recipe import REPOSITORY, Recipe, find_recipe
from recipes.common.tools import run_main, write_yaml
from recipes.language_model import data_folder
from shared_embeddings.utils.command_line import positive
from shared_embeddings.utils.errors import UserError

BENCHMARK, RECIPE, PLAIN_ROW = "rates", "ptb_awd_lstm", "small_standard"
_OTHERS = "projective funnel define define_half alone uncle adaptive group_reduce tensor_train structured"
ROWS = (PLAIN_ROW, *(f"small_{name}" for name in _OTHERS.split()))
RATES = {"sgd": (5.0, 10.0, 20.0, 40.0), "adam": (0.001, 0.002, 0.004, 0.008)}
# The other options of an optimizer.
OPTIONS: dict[str, dict[str, Any]] = {"sgd": {}, "adam": {"warmup_steps": 100}}


class Run(NamedTuple):
    """One training."""

    row: str
    optimizer: str
    rate: float


def train(recipe: Recipe, run: Run, epochs: int, children: list[subprocess.Popen[str]]) -> Record:
    """Train a row with an optimizer; returns the best validation perplexity, None if it diverged.

    The process is added to `children`, so that an interrupt can end it.
    """
    row = recipe.row(run.row)
    with tempfile.TemporaryDirectory(prefix=f"{run.row}-") as folder:
        settings = {
            **recipe.row(PLAIN_ROW).train,
            **{"embedding": recipe.with_files(row.embedding, recipe.home)},
            **{"data": str(data_folder(recipe, row)), "output_dir": f"{folder}/run"},
            **{"optimizer": run.optimizer, "learning_rate": run.rate, **OPTIONS[run.optimizer]},
            **{"epochs": epochs, "log_every": 1000},
        }
        config = Path(folder, "settings.yaml")
        write_yaml(config, settings)
        command = [sys.executable, "-m", "lm.train.command", "-config", str(config)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True) as process:
            children.append(process)
            printed, errors = process.communicate()
        if process.returncode and not re.search("not finite|the loss is", errors):
            raise UserError(f"{run.row}: lm_train failed: {errors.strip().splitlines()[-1]}")
        perplexities = map(float, re.findall(r"valid loss [\d.]+ ppl ([\d.]+)", printed))
    return {**run._asdict(), "perplexity": min(perplexities, default=None)}


def as_text(record: Mapping[str, Any]) -> str:
    """Return a line for each row with runs, the best of them in bold, and the names of the others."""
    results = {
        Run(run["row"], run["optimizer"], run["rate"]): run["perplexity"] for run in record["measured"]
    }
    columns = [(optimizer, rate) for optimizer, rates in RATES.items() for rate in rates]
    tried = [row for row in ROWS if any(row == run.row for run in results)]
    lines = []
    for row in tried:
        runs = [Run(row, *column) for column in columns]
        best = min((value for run in runs if (value := results.get(run)) is not None), default=None)
        cells = []
        for run in runs:
            value = results.get(run)
            missing = "diverged" if run in results else "not run"
            text = missing if value is None else f"{value:,.0f}"
            cells.append(f"**{text}**" if value is not None and value == best else text)
        lines.append([f"`{row}`", *cells])
    idle = ", ".join(f"`{row}`" for row in ROWS if row not in tried)
    titles = ["row", *(f"{'SGD' if optimizer == 'sgd' else 'Adam'} {rate:g}" for optimizer, rate in columns)]
    return markdown(titles, lines) + (f"\n\nNot run: {idle}." if idle else "")


def main(arguments: Sequence[str]) -> None:
    """Measure, or only write the table."""
    parser = parser_of("benchmarks.rates", __doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, metavar="ROW", help="default: all")
    parser.add_argument("--epochs", type=positive, default=1, help="of each run (default: 1)")
    parser.add_argument("--jobs", type=positive, default=1, help="runs at a time (default: 1)")
    options = parser.parse_args(arguments)
    recipe = find_recipe(RECIPE)
    record = dict(earlier_record(options.output, BENCHMARK) or {})
    if record.get("epochs") != options.epochs:
        record = {"epochs": options.epochs, "measured": []}
    done = {(run["row"], run["optimizer"], run["rate"]) for run in record["measured"]}
    runs = [Run(row, name, rate) for row in options.rows for name in RATES for rate in RATES[name]]
    children: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = [run for run in runs if run not in done]
        futures = [pool.submit(train, recipe, run, options.epochs, children) for run in waiting]
        try:
            for future in as_completed(futures):
                result = future.result()
                print(*result.values(), file=sys.stderr, flush=True)
                record["measured"] = [*record["measured"], result]
                if options.output:
                    save_record(options.output, BENCHMARK, record)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.terminate()
    publish(record, as_text(record), BENCHMARK, options)


if __name__ == "__main__":
    raise SystemExit(run_main(BENCHMARK, main))
