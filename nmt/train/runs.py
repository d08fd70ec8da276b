"""The run at ``save_model``: its settings, its lock, and where it is resumed."""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nmt.checkpoints import intact_steps, peek, remove_leftovers
from shared_embeddings.compress.distillation import OPTION
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import locked, refuse_link, remove, sha256

CHOICES = ("auto", "never", "overwrite")
# Options that a resumed run may change because they do not affect training steps.
FREE_TO_CHANGE = frozenset(
    ("config", "save_config", "save_model", "save_format", "save_checkpoint_steps", "keep_checkpoint")
    + ("resume", "train_steps", "report_every", "log_file", "log_file_level", "verbose")
    + ("tensorboard", "tensorboard_log_dir", "wandb", "exp", "exp_host", "num_workers", "prefetch_factor")
    + ("gpu_ranks", "gpu_backend", "gpu_verbose_level", "master_ip", "master_port", "timeout")
    + ("train_from", "reset_optim", "update_vocab", "override_opts", "valid_batch_size", "num_threads")
    + ("n_sample", "save_data", "overwrite", "dump_samples", "dump_transforms", "dump_preds", "scoring_debug")
)
# Options that name files, which are compared by content.
_FILES = re.compile(r"path_(src|tgt|align|txt)|(src|tgt)_(vocab|subword_model|subword_vocab)|.*_embeddings")
_CONTENT = "content "
_STOPPED = 2  # status of OpenNMT-py's early stopping


def settings_of(opt: Namespace, corpora: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a training and its corpora as plain values, with checksums of files."""
    given = {name: value for name, value in vars(opt).items() if not name.startswith("_")}
    settings = dict(_plain({**given, "data": corpora}))
    if isinstance(settings.get(OPTION), dict):
        settings[OPTION].pop("teacher", None)  # it is not read again and may be moved
    return settings


def _plain(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item, str(key)) for key, item in value.items()}
    if isinstance(value, str) and _FILES.fullmatch(name) and os.path.isfile(value):
        return f"{_CONTENT}{sha256(Path(value))}"
    return json.loads(json.dumps(value, default=str))


@contextmanager
def locked_run(opt: Namespace) -> Iterator[int | None]:
    """Hold the lock of a run, and remove temporary files of killed processes.

    Yields the descriptor of the lock on the machine with the first rank, and None on others.
    """
    if not leads(opt):
        yield None
        return
    start = Path(opt.save_model)
    with locked(start.with_name(f".{start.name}.lock")) as lock:
        remove_leftovers(opt.save_model)
        try:
            yield lock
        finally:
            remove_leftovers(opt.save_model)


def leads(opt: Namespace) -> bool:
    """Return whether this machine has the first rank, which writes the checkpoints."""
    return opt.world_size <= 1 or 0 in opt.gpu_ranks


def begin(opt: Namespace, settings: dict[str, Any]) -> bool:
    """Begin a run, or resume an existing one by setting ``train_from``; returns whether it existed.

    Checkpoints store the `settings`, see `settings_of`, as the record of the run.
    """
    own, given = Path(opt.save_model), Path(opt.train_from or "")
    is_own = re.fullmatch(rf"{re.escape(own.name)}_step_\d+\.pt", given.name)
    if is_own and given.parent.resolve() == own.parent.resolve():  # an explicit step of this run
        before = peek(opt.train_from).get("run")
        if before is not None:
            settings["train_from"] = before["settings"]["train_from"]
        return False
    files = step_files(opt.save_model)
    if opt.resume == "overwrite":
        for file in files if leads(opt) else ():
            remove(file)
        return False
    # Weights without a .pt are of a process that was killed while it saved.
    found = [step for file, step in files.items() if file.suffix == ".pt"]
    if not found:
        return False
    if opt.resume == "never":
        raise UserError(
            f"save_model: step {max(found)} of {opt.save_model} exists and resume is never; set resume: "
            "auto to resume the run, resume: overwrite to remove it, or choose another save_model"
        )
    _resume(opt, settings)
    return True


def _resume(opt: Namespace, settings: dict[str, Any]) -> None:
    """Set the options to resume the last intact step of an existing run; see `begin`."""
    whole = intact_steps(opt.save_model)
    if not whole:
        raise UserError(
            f"save_model: the checkpoints {opt.save_model}_step_*.pt are damaged; set resume: overwrite to "
            "remove them, or choose another save_model"
        )
    path = f"{opt.save_model}_step_{whole[-1]}.pt"
    refuse_link(Path(path))  # the model of another run would become this one
    before = peek(path).get("run")
    if before is None:
        raise UserError(
            f"save_model: {path} does not contain the settings of its run; set train_from to resume it, "
            "set resume: overwrite to remove it, or choose another save_model"
        )
    changed = differences(before["settings"], settings)
    if changed:
        raise UserError(
            f"save_model: {path} belongs to a run with other settings ({'; '.join(changed)}); restore them "
            "to resume it, set resume: overwrite to remove it, or choose another save_model"
        )
    opt.train_from, opt.reset_optim, opt.update_vocab, opt.override_opts = path, "none", False, False
    settings["train_from"] = before["settings"]["train_from"]


def step_files(save_model: str) -> dict[Path, int]:
    """Return the files of a run, complete or not, with their steps."""
    start = Path(save_model)
    pattern = re.compile(rf"{re.escape(start.name)}_step_(\d+)(\.pt|(\.\d+)?\.safetensors)")
    matches = ((path, pattern.fullmatch(path.name)) for path in start.parent.glob("*"))
    return {path: int(match[1]) for path, match in matches if match}


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


def is_finished(opt: Namespace) -> bool:
    """Return whether the run that ``train_from`` resumes is complete."""
    checkpoint = peek(opt.train_from)
    states = checkpoint.get("resume") or []
    stopped = [state["early_stopping"] for state in states if state.get("early_stopping")]
    if opt.early_stopping and any(state["status"] == _STOPPED for state in stopped):
        return True
    return bool(0 < opt.train_steps < checkpoint["optim"]["training_step"] and not opt.single_pass)
