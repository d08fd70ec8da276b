"""``results.jsonl``: settings, data, code versions and metrics of each row, one line per row."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_text
from shared_embeddings.utils.results import encoded, provenance

REPOSITORY = Path(__file__).resolve().parents[2]
FILE = "results.jsonl"
# Folder in a recipe's runs for --smoke.
SMOKE_FOLDER = "smoke"
PACKAGES = ("torch", "OpenNMT-py", "sacrebleu", "shared-embeddings")
BASELINE = "standard"
# Between the name of a row and another seed of it.
SEED = "_seed"
_REQUIRED = {"row": str, "config": dict, "counts": dict, "metrics": dict, "data_checksum": str}
Record = dict[str, Any]


def write_result(
    folder: Path,
    row: str,
    *,
    config: dict[str, Any],
    counts: dict[str, Any],
    metrics: dict[str, Any],
    data_checksum: str,
    **extra: Any,
) -> Path:
    """Write or replace the line of `row` in the ``results.jsonl`` of a folder, and return the file.

    Paths in the repository become relative. The date, git commit, dirty flag, versions and device are added.
    `config` has settings that are not defaults, `metrics` scores with signatures, speed and training time;
    `extra` are other values, such as ``peak_memory_mib``, and may override the device.
    """
    record = {
        "row": row,
        "metrics": metrics,
        "counts": counts,
        "data_checksum": data_checksum,
        **provenance(PACKAGES),
        "config": config,
        **extra,
    }
    path = folder / FILE
    line = encoded(path, record)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        records = {record["row"]: record for record in read_results(path)} if path.is_file() else {}
        records[row] = json.loads(line)
        lines = (encoded(path, records[name]) for name in sorted(records, key=natural))
        write_text(path, "".join(f"{line}\n" for line in lines))
    return path


def read_results(path: Path) -> list[Record]:
    """Read a ``results.jsonl``, or the one in a folder, in natural order of the rows."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file}: no such file; run an evaluation first")
    records = []
    # Other line ends than "\n" may be inside of a string.
    for number, line in enumerate(file.read_text(encoding="utf-8").removesuffix("\n").split("\n"), start=1):
        try:
            record = json.loads(line)
            valid = all(isinstance(record[key], kind) for key, kind in _REQUIRED.items())
        except (ValueError, KeyError, TypeError):
            valid = False
        if not valid:
            raise UserError(f"{file}: line {number}: invalid result; remove the line and evaluate again")
        records.append(record)
    return sorted(records, key=lambda record: natural(record["row"]))


def find_result(folder: Path, row: str) -> Record | None:
    """Return the record of `row` in the ``results.jsonl`` of a folder, or None."""
    if not (folder / FILE).is_file():
        return None
    return next((record for record in read_results(folder) if record["row"] == row), None)


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sorting key that compares numbers in a name as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)]


def is_baseline(row: str) -> bool:
    """Return whether others are compared with a row: ``standard``, or ``small_standard`` for ``small_…``."""
    return row == BASELINE or row.endswith(f"_{BASELINE}")


def describe_options(record: Record) -> str:
    """Return the method's options and what the row starts from, as they are written in ``rows.yaml``.

    Sizes that a fit chose, such as those of directions, are left out.
    """
    config = record["config"]
    options = (config.get("embedding") or {}).items()
    parts = [f"{key} {value}" for key, value in options if key not in ("method", "directions")]
    if distill := dict(config.get("distill") or {}):
        parts.append(f"distilled from {distill.pop('teacher')}")
        parts += [f"{name} {value}" for name, value in distill.items()]
    if fit := config.get("fit"):
        steps = f"recovered in {fit['recover_steps']:,} steps" if "recover_steps" in fit else "not trained"
        parts.append(f"fitted to {fit['teacher']}, {steps}")
    return ", ".join(parts) or "–"


def embedding_bits(counts: Mapping[str, float]) -> float:
    """Return the bits of input and output embeddings, including codes; the rest is in float32."""
    return counts["stored_bits"] - 32 * counts.get("rest", 0)


def times_smaller(counts: Mapping[str, float]) -> float:
    """Return how many times fewer bits than a plain table in float32, without biases, the embedding takes."""
    dense = counts["dense_embedding"] if "dense_embedding" in counts else counts["table"]
    return 32 * dense / embedding_bits(counts)


class Measure(NamedTuple):
    """A quality of models: its title, decimals, and whether higher is better."""

    title: str
    decimals: int
    higher_is_better: bool

    def describe(self, values: Sequence[float]) -> str:
        """Format the values of several seeds as mean ± standard deviation."""
        mean = f"{statistics.fmean(values):.{self.decimals}f}"
        if len(values) == 1:
            return mean
        return f"{mean} ± {statistics.stdev(values):.{self.decimals}f} ({len(values)} seeds)"


# In the order of importance: a recipe is judged by the first that its results have.
_MEASURES = {
    "bleu": Measure("BLEU", 2, True),
    "bleu_newstest2014": Measure("BLEU on newstest2014", 2, True),
    "bleu_newstest2017": Measure("BLEU on newstest2017", 2, True),
    "perplexity": Measure("test perplexity", 2, False),
    "valid_perplexity": Measure("validation perplexity", 2, False),
    "pointer_perplexity": Measure("test perplexity with pointer", 2, False),
    "chrf": Measure("chrF", 2, True),
    "rouge1": Measure("ROUGE-1", 2, True),
    "rouge2": Measure("ROUGE-2", 2, True),
    "rougeL": Measure("ROUGE-L", 2, True),
    "rho": Measure("Spearman's rho", 3, True),
    "kept": Measure("greedy choice kept", 3, True),
    "top10": Measure("10 nearest neighbors kept", 3, True),
    "relative_error": Measure("relative error", 3, False),
    "reconstruction_loss": Measure("reconstruction loss", 3, False),
    "training_ms": Measure("training ms per batch", 0, False),
    "inference_ms": Measure("inference ms per batch", 0, False),
}


def find_measure(key: str) -> Measure | None:
    """Return the measure of a key of `flatten` or of a row's ``paper``; None for other figures."""
    name, _, part = key.partition(" ")
    measure = _MEASURES.get(name)
    return measure._replace(title=f"{measure.title}, {part}") if measure and part else measure


def by_importance(keys: Iterable[str]) -> list[str]:
    """Return the keys that have a measure, the most important first."""
    order = list(_MEASURES)
    return sorted(filter(find_measure, keys), key=lambda key: order.index(key.partition(" ")[0]))


def flatten(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that models are judged by, of the ``metrics`` of a results file.

    ROUGE recall of headlines at a length is ``rouge1 75 bytes``, Spearman's rho of a set is ``rho SET``,
    and the share of a decoder's most probable words that stay is ``kept TEXT``.
    """
    flat = {key: metrics[key] for key in _MEASURES if key in metrics}
    lengths = {key.removeprefix("length_"): scores for key, scores in metrics.items() if "length_" in key}
    for length, scores in lengths.items():
        for name, score in scores["recall"].items():
            if name in _MEASURES:
                flat[f"{name} {length} bytes" if len(lengths) > 1 else name] = score["mean"]
    for name, key, part in (("rho", "similarity", "rho"), ("kept", "texts", "kept")):
        for text, score in (metrics.get(key) or {}).items():
            flat[f"{name} {text}"] = score[part]
    return {key: float(value) for key, value in flat.items() if isinstance(value, (int, float))}
