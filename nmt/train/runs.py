"""The run at ``save_model``: its settings, its lock, and where it is resumed."""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nmt.checkpoints import read_checkpoint, step_files
from shared_embeddings.compress.distillation import OPTION
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import sha256
from shared_embeddings.utils.reading import parse_yaml

CHOICES = ("auto", "never", "overwrite")
# Options that a resumed run may change because they do not affect training steps.
FREE_TO_CHANGE = frozenset(
    ("config", "save_config", "save_model", "save_format", "save_checkpoint_steps", "keep_checkpoint")
    + ("resume", "train_steps", "valid_steps", "report_every", "log_file", "log_file_level", "verbose")
    + ("tensorboard", "tensorboard_log_dir", "wandb", "exp", "exp_host", "num_workers", "prefetch_factor")
    + ("gpu_ranks", "gpu_backend", "gpu_verbose_level", "master_ip", "master_port", "timeout")
    + ("train_from", "reset_optim", "update_vocab", "override_opts", "valid_batch_size", "num_threads")
    + ("n_sample", "save_data", "overwrite", "dump_samples", "dump_transforms", "dump_preds", "scoring_debug")
)
# Options that name files, which are compared by content.
_FILES = re.compile(r"path_(src|tgt|align|txt)|(src|tgt)_(vocab|subword_model|subword_vocab)|.*_embeddings")
_CONTENT = "content "
_STOPPED = 2  # status of OpenNMT-py's early stopping


def settings_of(opt: Namespace) -> dict[str, Any]:
    """Return all options of a training as plain values, with checksums of the files that they name."""

    def plain(value: Any, name: str = "") -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(item, str(key)) for key, item in value.items()}
        if isinstance(value, str) and _FILES.fullmatch(name) and os.path.isfile(value):
            return f"{_CONTENT}{sha256(Path(value))}"
        return json.loads(json.dumps(value, default=str))

    options = {name: value for name, value in vars(opt).items() if not name.startswith("_")}
    settings: dict[str, Any] = plain({**options, "data": parse_yaml(opt.data, "data")})
    if isinstance(settings.get(OPTION), dict):
        settings[OPTION].pop("teacher", None)  # it is not read again and may be moved
    return settings


def leads(opt: Namespace) -> bool:
    """Return whether this machine has the first rank, which writes the checkpoints."""
    return opt.world_size <= 1 or 0 in opt.gpu_ranks


def begin(opt: Namespace) -> dict[str, Any] | None:
    """Begin a run, or resume an existing one by setting ``train_from``.

    Returns:
        The record of the run, which its checkpoints store; None if the run is finished.
    """
    settings = settings_of(opt)
    files = step_files(opt.save_model)
    is_explicit_step = opt.train_from and Path(opt.train_from).resolve() in map(Path.resolve, files)
    if opt.resume == "overwrite" and not is_explicit_step:
        for file in files if leads(opt) else ():
            file.unlink()
        return {"settings": settings}
    # Weights without a .pt are of a process that was killed while it saved.
    steps = [file for file in files if file.suffix == ".pt"]
    if is_explicit_step:
        record = read_checkpoint(opt.train_from).get("run")
        if record is not None:
            settings["train_from"] = record["settings"]["train_from"]
        return {"settings": settings}
    if not steps:
        return {"settings": settings}
    if opt.resume == "never":
        raise UserError(
            f"save_model: {steps[-1]} exists and resume is never; set resume: auto to resume the run, "
            "resume: overwrite to remove it, or choose another save_model"
        )
    checkpoint = None
    while checkpoint is None:
        if not steps:
            raise UserError(
                f"save_model: the checkpoints {opt.save_model}_step_*.pt are damaged; set resume: overwrite "
                "to remove them, or choose another save_model"
            )
        path = str(steps.pop())
        with suppress(UserError):  # a process was killed between the two files of a step
            checkpoint = read_checkpoint(path)
    changed = ["the checkpoint does not have them"]
    if checkpoint.get("run") is not None:
        before = checkpoint["run"]["settings"]
        changed = differences(before, settings)
        settings["train_from"] = before["train_from"]
    if changed:
        raise UserError(
            f"save_model: {path} belongs to a run with other settings ({'; '.join(changed)}); restore them "
            "to resume it, set resume: overwrite to remove it, or choose another save_model"
        )
    opt.train_from, opt.reset_optim, opt.update_vocab, opt.override_opts = path, "none", False, False
    stopped = [state["early_stopping"] for state in checkpoint["resume"] or () if state["early_stopping"]]
    has_stopped = opt.early_stopping and any(state["status"] == _STOPPED for state in stopped)
    has_all_steps = 0 < opt.train_steps < checkpoint["optim"]["training_step"] and not opt.single_pass
    return None if has_stopped or has_all_steps else {"settings": settings}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe changed settings that a resumed run must not change; new options are not compared."""
    names = sorted((before.keys() & now.keys()) - FREE_TO_CHANGE)
    changes = [line for name in names for line in _difference(name, before[name], now[name])]
    if now["train_from"]:  # otherwise the run's own start does not matter
        changes += _difference("train_from", before["train_from"], now["train_from"])
    return changes


def _difference(name: str, before: Any, now: Any) -> list[str]:
    """Describe how two values of one option differ, key by key."""
    if before == now:
        return []
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*before, *(key for key in now if key not in before)]
        return [line for key in keys for line in _difference(f"{name}.{key}", before.get(key), now.get(key))]
    if all(isinstance(value, str) and value.startswith(_CONTENT) for value in (before, now)):
        return [f"the content of {name} has changed"]
    return [f"{name} was {before!r} and is {now!r}"]
