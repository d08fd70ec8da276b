"""The configuration of a training run: one flat mapping whose every key is known, checked, and used.

Keys are of four groups: training itself, the model kind, the optimizer, and the schedule of its learning
rate. Which keys the last three have depends on what was chosen; a key of another choice is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Literal

from lm import models
from lm.randomness import SEEDS
from lm.train.optim import OPTIMIZERS
from lm.train.schedules import SCHEDULES
from shared_embeddings.errors import UserError
from shared_embeddings.fitting.distillation import OPTION, check_seed, parse_distillation
from shared_embeddings.options import parse_options, require, require_at_least

# What a resumed run may change: none of these alters what a step does.
FREE_TO_CHANGE = ("data", "save", "epochs", "steps", "log_every", "save_every", "device", "compile")


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """Options of training, whatever the model.

    Attributes:
        data: folder that lm_prepare wrote.
        save: folder of the run: last.pt, best.pt, config.yaml, train.log, tensorboard/, .lock.
        embedding: method of the shared embedding and its options, such as {method: funnel, rank: 64}.
        model: kind of the model.
        optimizer: how parameters follow their gradients.
        schedule: how the learning rate changes.
        epochs: length of training in passes through the data; give this or 'steps'.
        steps: length of training in optimizer steps; give this or 'epochs'.
        batch_size: columns of text side by side in each process.
        accumulate: parts that a batch is computed in, one after another; the same result in less memory.
        sequence_length: tokens per segment that gradients flow through.
        vary_length: draw the length of every segment anew (AWD-LSTM): 'sequence_length', or half of it with
            probability 0.05, plus normal noise of 5; the learning rate is scaled by the length.
        warmup_steps: steps over which the learning rate rises from zero.
        clip_norm: largest norm of the gradient of all parameters together; null for no limit.
        precision: bf16 computes forward passes in bfloat16 where torch's autocast holds that safe.
        compile: compile the model with torch.compile.
        device: cpu, cuda, or auto for cuda where there is one.
        seed: of initial parameters, dropout and segment lengths.
        embedding_distillation: {teacher: CHECKPOINT, alpha: 0.01} fits the embedding to the table of a
            trained model, begins with its network, and keeps the table near (Distilled Embedding).
        start_from: checkpoint whose parameters are the initial ones, such as best.pt of another run.
        evaluate_every: steps between two validations; null for one at the end of every epoch.
        valid_batch_size: equal parts that the validation text is cut into; their first words have no context.
        patience: validations without improvement, as 'nonmono' counts them, that end training; null for none.
        save_every: steps between two last.pt; null to save after every validation only.
        log_every: steps between two lines of the log.
    """

    data: str
    save: str
    embedding: Mapping[str, Any]
    model: str = "awd_lstm"
    optimizer: str = "sgd"
    schedule: str = "constant"
    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 20
    accumulate: int = 1
    sequence_length: int = 70
    vary_length: bool = False
    warmup_steps: int = 0
    clip_norm: float | None = 0.25
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 1
    embedding_distillation: Mapping[str, Any] | None = None
    start_from: str | None = None
    evaluate_every: int | None = None
    valid_batch_size: int = 10
    patience: int | None = None
    save_every: int | None = None
    log_every: int = 100

    def __post_init__(self) -> None:
        """Check sizes, and that the length is given once."""
        for name in ("epochs", "steps", "batch_size", "accumulate", "sequence_length", "valid_batch_size"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("evaluate_every", "save_every", "log_every"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("warmup_steps", "patience"):
            require_at_least(name, getattr(self, name), 0)
        require(
            (self.epochs is None) != (self.steps is None),
            f"'epochs' is {self.epochs} and 'steps' is {self.steps}; give exactly one of them",
        )
        require(
            0 <= self.seed < SEEDS,
            f"option 'seed' is {self.seed}, but it must be at least 0 and below 2**63; choose another number",
        )
        require(
            self.clip_norm is None or self.clip_norm > 0,
            f"option 'clip_norm' is {self.clip_norm}, but it must be above 0; raise it, or set it to null",
        )
        require(
            self.batch_size % self.accumulate == 0,
            f"'accumulate' is {self.accumulate}, but it must divide 'batch_size' {self.batch_size}; "
            "change one of them",
        )
        if self.embedding_distillation is not None:
            distillation = parse_distillation(self.embedding_distillation)
            check_seed(distillation, self.embedding)
            require(
                self.start_from is None,
                f"'start_from' has no effect beside '{OPTION}', which says what the model starts from; "
                "remove one of them",
            )


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A checked configuration.

    Attributes:
        training: options of training.
        model: options of the model's kind; a frozen dataclass that the kind names.
        optimizer: options of the optimizer.
        schedule: options of the learning rate's schedule.
    """

    training: TrainingOptions
    model: Any
    optimizer: Any
    schedule: Any

    def flat(self) -> dict[str, Any]:
        """All keys with their values, in types that YAML has; `parse` gives the same configuration back."""
        values: dict[str, Any] = {}
        for group in (self.training, self.model, self.optimizer, self.schedule):
            values |= plain(dataclasses.asdict(group))
        return values

    def model_options(self) -> dict[str, Any]:
        """The options of the model's kind, in types that YAML has."""
        return dict(plain(dataclasses.asdict(self.model)))


def parse(given: Mapping[str, Any]) -> Configuration:
    """Check a flat mapping of keys to values.

    Raises:
        UserError: an unknown key, or one that belongs to a choice that was not made.
        OptionError: a missing key, a wrong type, an impossible value.
    """
    kind = _choice("model", given, models.kinds())
    optimizer = _choice("optimizer", given, list(OPTIMIZERS))
    schedule = _choice("schedule", given, list(SCHEDULES))
    groups = {
        "training": TrainingOptions,
        f"model {kind}": models.options_class(kind),
        f"optimizer {optimizer}": OPTIMIZERS[optimizer],
        f"schedule {schedule}": SCHEDULES[schedule],
    }
    for key in given:
        if not any(key in _names(options) for options in groups.values()):
            raise UserError(_unknown(key, groups))
    parsed: list[Any] = [
        parse_options(name, options, {key: given[key] for key in given if key in _names(options)})
        for name, options in groups.items()
    ]
    return Configuration(*parsed)


def all_groups() -> dict[str, type]:
    """Every group of keys under its title: training, each model kind, optimizer and schedule."""
    return {
        "training": TrainingOptions,
        **{f"model {kind}": models.options_class(kind) for kind in models.kinds()},
        **{f"optimizer {name}": options for name, options in OPTIMIZERS.items()},
        **{f"schedule {name}": options for name, options in SCHEDULES.items()},
    }


def _choice(key: str, given: Mapping[str, Any], valid: list[str]) -> str:
    """The value of a key that selects other keys."""
    default = TrainingOptions.__dataclass_fields__[key].default
    value = given.get(key, default)
    if value not in valid:
        close = difflib.get_close_matches(str(value), valid, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"{key} is {value!r}, but it must be one of {', '.join(valid)}{hint}")
    return str(value)


def _unknown(key: str, groups: Mapping[str, type]) -> str:
    """The message about a key that nothing chosen has."""
    owners = [title for title, options in all_groups().items() if key in _names(options)]
    if owners:
        kind = owners[0].split()[0]
        chosen = next(title for title in groups if title.startswith(kind))
        return f"'{key}' has no effect with {chosen}: it belongs to {', '.join(owners)}; remove it"
    known = [name for options in groups.values() for name in _names(options)]
    close = difflib.get_close_matches(key, known, 1)
    return f"unknown key '{key}'; " + (f"did you mean '{close[0]}'?" if close else "see lm_train --help")


def _names(options: type) -> list[str]:
    """The keys of one group."""
    return [field.name for field in dataclasses.fields(options)]


def plain(value: Any) -> Any:
    """`value` with lists for tuples and dicts for other mappings, all the way down."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
