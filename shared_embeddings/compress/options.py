"""The options of `compress`, each declared once, for Python and for the command line.

Texts such as ``"8x"``, ``"1%"`` and ``"20min"`` are checked when the options are made.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from shared_embeddings.runtimes.base import Runtime, runtimes
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import check_known, option, require_at_least
from shared_embeddings.utils.paths import (
    existing_file,
    existing_path,
    model_path,
    new_path,
    output_path,
    shared_table,
)

# Modules that import torch are imported by the functions, so that help comes at once.
if TYPE_CHECKING:
    from shared_embeddings.compress.sizing import Target

SKIP_UNDECODABLE = "leave out word vectors whose words are not UTF-8 text, instead of failing"
MODEL = "a trained model: a file, a folder, or its name on the Hugging Face Hub"
# How the numbers of embeddings may be stored by `compress`; None is the default of a method.
Store = Literal["fp32", "fp16", "int8"]
# In place of a file with a calibration.
NO_CALIBRATION = Path("none")


class MaxLoss(NamedTuple):
    """The largest loss of a model: a share of its quality, or the divergence of its predictions in nats."""

    limit: float
    in_nats: bool


class Duration(NamedTuple):
    """How long a model is trained: minutes of wall time, or steps, which give the same result every time."""

    minutes: float | None
    steps: int | None

    def done(self, steps: int, seconds: float) -> float:
        """Return the fraction of the training that is done."""
        return seconds / (60.0 * self.minutes) if self.minutes is not None else steps / (self.steps or 1)


def parse_fraction(name: str, text: str) -> float:
    """Return a fraction from a text such as 1% or 0.01."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)(%?)", text.strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else math.nan
    if not 0.0 <= value <= 1.0:
        raise UserError(f"{name} is '{text}', which is not a fraction; write 1% or 0.01")
    return value


def parse_max_loss(text: str) -> MaxLoss:
    """Return the largest loss from a text such as 1%, 0.01 or 0.02nats."""
    if match := re.fullmatch(r"([0-9]*\.?[0-9]+) ?nats", text.strip()):
        return MaxLoss(float(match[1]), in_nats=True)
    return MaxLoss(parse_fraction("max_loss", text), in_nats=False)


def parse_duration(text: str) -> Duration:
    """Return how long to train from a text such as 20min or 1500steps."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) ?(min|steps)", text.strip())
    if match is None or not float(match[1]) > 0 or (match[2] == "steps" and not match[1].isdecimal()):
        raise UserError(f"recover is '{text}', which is no time to train; write 20min or 1500steps")
    if match[2] == "min":
        return Duration(float(match[1]), None)
    return Duration(None, int(match[1]))


def check_runtime(name: str, gguf: Path | None) -> Runtime:
    """Return the runtime of a name; UserError if there is none, or a GGUF file is missing or has no use."""
    check_known("runtime", name, runtimes())
    runtime = runtimes()[name]
    if runtime.takes_gguf != (gguf is not None):
        raise UserError(
            f"runtime {name}: {'needs' if runtime.takes_gguf else 'does not take'} a GGUF file of the model "
            f"(gguf); {'name' if runtime.takes_gguf else 'remove'} it"
        )
    return runtime


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressOptions:
    """What to compress and how; without `method`, several are tried and the best one is kept."""

    model: Path = option(MODEL, parse=model_path)
    output: Path | None = option("output path, in the format of the model", None, parse=new_path)
    skip_undecodable: bool = option(SKIP_UNDECODABLE, False)
    compare: bool = option("only compare candidates, also at other sizes, and write no model", False)
    force: bool = option("overwrite existing files", False)

    table: str | None = option(
        "the name of a tensor in safetensors: code this table alone, in blocks of rows, so that it need not "
        "fit in memory; * stands for the number of a part, as in table.shard_*.weight",
        None,
        parse=shared_table,
    )
    part: str | None = option(
        "with table: code only this part, such as 0/4; by default RANK/WORLD_SIZE, as torchrun sets them",
        None,
    )

    size: str | None = option("size of the embeddings: a factor such as 8x, or at most 500kB or 20MB", None)
    bits: float | None = option("size of the embeddings: bits for each number of the tables", None)
    max_loss: str | None = option(
        "find the smallest size that loses at most this: 1% of the quality on validation data, or without it "
        "of the text's perplexity or of the predictions; 0.02nats is a divergence of the predictions",
        None,
    )

    runtime: str | None = option(
        lambda: (
            "write the model in this runtime's own codes (see bits, grid), which run without this package: "
            + "; ".join(f"{name}: {runtime.about}" for name, runtime in runtimes().items())
        ),
        None,
        flag="for",
        choices=runtimes,
    )
    grid: str | None = option("the runtime's name for its codes, such as Q4_0", None)
    gguf: Path | None = option(
        "a GGUF file of the model, for llama.cpp: its other tensors are copied", None, parse=existing_file
    )

    method: str | None = option(
        "see 'shared-embeddings methods'; also with its options: '{method: define, map_dim: 64, output: "
        "table}' (default: try several and keep the best)",
        None,
    )
    store: Store | None = option("storage dtype; the default depends on the method", None)
    fit_steps: int | None = option("steps of gradient descent, for methods that use it", None)
    seed: int = option("seed of all random numbers", 0)

    text: tuple[Path, ...] = option(
        "text like that of your application (raw for Hugging Face models, otherwise tokenized as in "
        "training): its tokens are counted, and it calibrates the codes and compares predictions",
        (),
        parse=existing_file,
    )
    only_text: bool = option(
        "keep only what the text needs, not the other languages and the code that the model knows", False
    )
    token_counts: Path | None = option(
        "file with a token, a tab and its count per line", None, parse=existing_file
    )
    calibration: Path | None = option(
        "file of a calibration: read if it exists, written otherwise; 'none' rounds to the nearest codes",
        None,
        parse=output_path,
    )
    trim_to: tuple[Path, ...] = option(
        "first trim the vocabulary to these texts, like trim; sizes are relative to the result",
        (),
        parse=existing_file,
    )

    recover: str | None = option(
        "then train the model on the text, or on what the original generates, to bring its predictions "
        "closer to the original's: 20min, or 1500steps for a repeatable result; the same command resumes "
        "after an interruption",
        None,
    )

    validation: Path | None = option("text for the perplexity of a language model", None, parse=existing_path)
    validation_source: Path | None = option(
        "source text for the BLEU of a translation model", None, parse=existing_file
    )
    validation_target: Path | None = option(
        "its reference translation, tokenized like the output", None, parse=existing_file
    )
    check: bool = option(
        "run the model to measure what it keeps; not doing so takes less memory and needs a method", True
    )
    report: Path | None = option("also write the report to this JSON file", None, parse=new_path)

    def __post_init__(self) -> None:
        require_at_least("seed", self.seed, 0)
        require_at_least("fit_steps", self.fit_steps, 1)
        if self.token_counts is not None and self.text:
            raise UserError("token_counts and text both provide counts; remove one of them")
        if self.only_text and not (self.text or self.token_counts):
            raise UserError("only_text needs a text; give text, or remove it")
        if self.compare == (self.output is not None):
            raise UserError("give either output or compare")
        self._reject_with(
            self.compare, ("force", "report", "recover", "method"), "compare, which writes no model"
        )
        self._reject_with(
            not self.check, ("recover", "validation", "validation_source", "runtime"), "check=False"
        )
        if self.table is not None:
            what = "table, whose rows are coded alone"
            self._reject_with(
                True, ("force", "compare", "size", "max_loss", "runtime", "store", "report"), what
            )
            self._reject_with(True, ("text", "token_counts", "calibration", "trim_to", "recover"), what)
            self._reject_with(True, ("validation", "validation_source", "skip_undecodable"), what)
        elif self.part is not None:
            raise UserError("part has no effect without table; also name the table")
        if self.method is None and self.runtime is None and self.table is None:
            self._reject_with(True, ("store", "fit_steps"), "several methods; also give method")
            if not self.check:
                raise UserError("check=False needs a method: several are compared by running the model")
        sizes = [name for name in ("size", "bits", "max_loss") if getattr(self, name) is not None]
        if len(sizes) > 1 or (not sizes and not (self.method or self.grid or self.table)):
            raise UserError("give exactly one of size, bits and max_loss, or a method")
        if self.runtime is None:
            self._reject_with(True, ("grid", "gguf"), "codes of this package; also give the runtime (for)")
        else:
            names = ("method", "store", "size", "max_loss", "recover", "compare")
            self._reject_with(True, names, "a runtime (for), which has its own codes")
            check_runtime(self.runtime, self.gguf)
        if self.method is not None and self.max_loss is not None:
            raise UserError("max_loss compares methods; remove method")
        if (self.validation_source is None) != (self.validation_target is None):
            raise UserError("validation_source and validation_target belong together; give both")
        if self.max_loss is not None:
            parse_max_loss(self.max_loss)
        self.target()
        if self.recover is not None:
            parse_duration(self.recover)

    def _reject_with(self, condition: bool, names: tuple[str, ...], what: str) -> None:
        for name in names if condition else ():
            if getattr(self, name):
                raise UserError(f"{name} has no effect with {what}; remove one of them")

    def target(self) -> Target | None:
        """Return the size of the embeddings; None where it is searched, or other options set it."""
        from shared_embeddings.compress.sizing import Target, parse_size

        if self.size is not None:
            return parse_size(self.size)
        return None if self.bits is None else Target(bits=self.bits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrimOptions:
    """Which tokens of a trained model to keep."""

    model: Path = option(MODEL, parse=model_path)
    skip_undecodable: bool = option(SKIP_UNDECODABLE, False)
    text: tuple[Path, ...] = option(
        "texts whose tokens to keep: raw for Hugging Face models, otherwise tokenized as in training",
        (),
        parse=existing_file,
    )
    source_text: tuple[Path, ...] = option(
        "the same for the source of a translation model", (), parse=existing_file
    )
    target_text: tuple[Path, ...] = option(
        "the same for the target of a translation model", (), parse=existing_file
    )
    held_out: tuple[Path, ...] = option(
        "texts that select no tokens: report how many of their lines round-trip",
        (),
        parse=existing_file,
    )
    keep: tuple[Path, ...] = option("more tokens to keep, one per line", (), parse=existing_file)
    output: Path | None = option("output path, in the format of the model", None, parse=new_path)
    dry_run: bool = option("only report the tokens to keep and the size; write no model", False)
    min_count: int = option("remove tokens that occur less often than this in the texts", 1)
    top_k: int | None = option("keep this many of the most frequent tokens of the texts", None)
    coverage: str | None = option(
        "keep the most frequent tokens that cover this fraction of the texts, such as 99.9%", None
    )
    force: bool = option("overwrite existing files", False)

    def __post_init__(self) -> None:
        if self.dry_run == (self.output is not None):
            raise UserError("give either output or dry_run")
        require_at_least("min_count", self.min_count, 1)
        require_at_least("top_k", self.top_k, 1)
        limits = {"min_count": self.min_count > 1, "top_k": self.top_k, "coverage": self.coverage}
        names = [name for name, value in limits.items() if value]
        if len(names) > 1:
            raise UserError(f"{' and '.join(names)} each limit the tokens; give one of them")
        if self.coverage is not None and parse_fraction("coverage", self.coverage) == 0:
            raise UserError(f"coverage is '{self.coverage}', but it must be above 0%")
