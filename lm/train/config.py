"""Configuration of a training run: a flat mapping, from YAML and the command line, with validated keys.

There are five groups of keys: training, model, optimizer, learning rate schedule and n-grams. The keys of
three depend on which model, optimizer and schedule are chosen; keys of other choices raise an error.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from lm import models
from lm.models.ngrams import NGramOptions
from lm.train.optim import OPTIMIZERS, SCHEDULES
from shared_embeddings.compress.distillation import OPTION, check_seed, parse_distillation
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.options import (
    OptionError,
    check_known,
    option,
    option_metadata,
    parse_options,
    parse_words,
    require,
)
from shared_embeddings.utils.reading import read_yaml

# Keys that may change when a run resumes: none of them affects the result of a step.
FREE_TO_CHANGE = {
    *("data", "output_dir", "epochs", "steps", "log_every", "save_every", "device", "compile", "wandb")
}


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """Training options that do not depend on the model."""

    data: str = option("folder written by lm_prepare.")
    output_dir: str = option("folder of the run: last.pt, best.pt, config.yaml, train.log, tensorboard/.")
    embedding: Mapping[str, Any] = option(
        "method of the shared embedding and its options, such as {method: funnel, rank: 64}."
    )
    model: str = option("architecture of the language model.", "awd_lstm")
    optimizer: str = option("update rule.", "sgd")
    schedule: str = option("learning rate schedule.", "constant")
    epochs: int | None = option("length of training in epochs; set this or 'steps'.", None, minimum=1)
    steps: int | None = option(
        "length of training in optimizer steps; set this or 'epochs'.", None, minimum=1
    )
    batch_size: int = option("text columns per process.", 20, minimum=1)
    grad_accum_steps: int = option(
        "number of parts that each batch is split into; same result with less memory.", 1, minimum=1
    )
    sequence_length: int = option(
        "tokens per segment (truncated backpropagation through time).", 70, minimum=1
    )
    random_bptt: bool = option(
        "vary the segment length as in AWD-LSTM: 'sequence_length', or half of it with probability 0.05, "
        "plus Gaussian noise with std 5; the learning rate scales with the length.",
        False,
    )
    warmup_steps: int = option("steps of linear learning rate warmup.", 0, minimum=0)
    max_grad_norm: float | None = option(
        "gradient clipping threshold over all parameters; null disables clipping.", 0.25
    )
    precision: Literal["fp32", "bf16"] = option(
        "bf16 runs the forward pass in bfloat16 under torch.autocast.", "fp32"
    )
    compile: bool = option("compile the model with torch.compile.", False)
    device: Literal["auto", "cpu", "cuda"] = option("cpu, cuda, or auto (CUDA if available).", "auto")
    # torch allows twice as many; the upper half is for derived seeds.
    seed: int = option("for initialization, dropout and segment lengths.", 1, minimum=0, below=2**63)
    embedding_distillation: Mapping[str, Any] | None = option(
        "{teacher: CHECKPOINT, alpha: 0.01} fits the embedding to the table of a trained model, starts from "
        "its network, and keeps the table close (Distilled Embedding).",
        None,
    )
    init_from: str | None = option(
        "checkpoint to initialize the parameters from, such as best.pt of another run.", None
    )
    evaluate_every: int | None = option(
        "steps between validations; null validates after every epoch.", None, minimum=1
    )
    valid_batch_size: int = option(
        "number of equal chunks of the validation text, each starting without context.", 10, minimum=1
    )
    patience: int | None = option(
        "stop after this many validations without improvement, counted as for 'nonmono'; null disables "
        "early stopping.",
        None,
        minimum=1,
    )
    save_every: int | None = option(
        "steps between saves of last.pt; null saves only after validations.", None, minimum=1
    )
    log_every: int = option("steps between log lines.", 100, minimum=1)
    wandb: str | None = option("Weights & Biases project for logging; null disables it.", None)

    def __post_init__(self) -> None:
        require(
            (self.epochs is None) != (self.steps is None),
            f"'epochs' is {self.epochs} and 'steps' is {self.steps}; give exactly one of them",
        )
        require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            f"option 'max_grad_norm' is {self.max_grad_norm}, but it must be above 0 or null",
        )
        require(
            self.batch_size % self.grad_accum_steps == 0,
            f"'grad_accum_steps' is {self.grad_accum_steps}, but it must divide 'batch_size' "
            f"{self.batch_size}; change one of them",
        )
        if self.embedding_distillation is not None:
            distillation = parse_distillation(self.embedding_distillation)
            check_seed(distillation, self.embedding)
            require(
                self.init_from is None,
                f"'init_from' has no effect together with '{OPTION}', which also initializes the model; "
                "remove one of them",
            )


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A validated configuration."""

    training: TrainingOptions
    model: Any  # an instance of the model's `options_class`
    optimizer: Any  # of one of `OPTIMIZERS`
    schedule: Any  # of one of `SCHEDULES`
    ngrams: NGramOptions = NGramOptions()  # noqa: RUF009  (frozen)

    def flat(self) -> dict[str, Any]:
        """All keys with their values as plain YAML types; `parse` inverts this."""
        values: dict[str, Any] = {}
        for group in (self.training, self.model, self.optimizer, self.schedule, self.ngrams):
            values |= plain(dataclasses.asdict(group))
        return values


def parse(values: Mapping[str, Any]) -> Configuration:
    """Validate a flat mapping of keys to values.

    Raises:
        OptionError: a key is unknown, missing, or belongs to another model, optimizer or schedule; or a value
            has the wrong type or is out of range.
    """
    every = all_groups()
    groups: dict[str, type] = {"training": TrainingOptions}
    for key in ("model", "optimizer", "schedule"):
        value = values.get(key, TrainingOptions.__dataclass_fields__[key].default)
        check_known(key, value, [title.split()[1] for title in every if title.startswith(f"{key} ")])
        groups[f"{key} {value}"] = every[f"{key} {value}"]
    groups["ngrams"] = NGramOptions
    known = {title: [field.name for field in dataclasses.fields(options)] for title, options in every.items()}
    names = [name for title in groups for name in known[title]]
    for key in values:
        owners = [title for title in every if key in known[title]]
        if owners and key not in names:
            kind = owners[0].split()[0]
            chosen = next(title for title in groups if title.startswith(kind))
            raise OptionError(
                f"'{key}' has no effect with {chosen}: it belongs to {', '.join(owners)}; remove it"
            )
        check_known("key", key, names)
    parsed: list[Any] = [
        parse_options(title, options, {key: values[key] for key in values if key in known[title]})
        for title, options in groups.items()
    ]
    return Configuration(*parsed)


def all_groups() -> dict[str, type]:
    """All groups of keys by title: training and every model, optimizer and schedule."""
    return {
        "training": TrainingOptions,
        **{f"model {kind}": models.options_class(kind) for kind in models.kinds()},
        **{f"optimizer {name}": options for name, options in OPTIMIZERS.items()},
        **{f"schedule {name}": options for name, options in SCHEDULES.items()},
        "ngrams": NGramOptions,
    }


def plain(value: Any) -> Any:
    """`value` with tuples converted to lists and mappings to dicts, recursively."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def from_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse ``-config FILE -key value …``; the command line overrides the file.

    Raises:
        UserError: see `parse_words`; or the file cannot be read.
    """
    values = parse_words(arguments)
    if "config" not in values:
        return values
    path = Path(str(values.pop("config")))
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"config {path}: is not a mapping; write one 'key: value' per line")
    return {**content, **values}


def help_text() -> str:
    """All keys by group with their defaults and descriptions."""
    lines = [
        "usage: lm_train [-config FILE] [-key value ...]",
        "",
        "Trains a language model, or resumes the run in 'output_dir'. FILE is YAML with one key per line;",
        "values on the command line are YAML, too, and override those of FILE. One of 'epochs' and 'steps'",
        "is required.",
    ]
    for title, options in all_groups().items():
        lines += ["", f"{title}:"]
        for field in dataclasses.fields(options):
            about = option_metadata(options, field.name)["description"]
            value, default = field.default, "required"
            if field.default_factory is not dataclasses.MISSING:
                value = field.default_factory()
            if value is not dataclasses.MISSING:
                default = yaml.safe_dump(plain(value), default_flow_style=True).removesuffix("...\n").strip()
            entry = f"  {field.name} ({default}): {about}"
            lines += textwrap.wrap(entry, 100, subsequent_indent=" " * 6)
    return "\n".join([*lines, "", "example: lm_train -config train.yaml -learning_rate 20"])
