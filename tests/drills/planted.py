"""Folders of strangers: whatever is planted in them reaches nothing outside, and stops no command.

Each try copies the inputs of a command into a folder, plants one thing there, and runs the command. It is
"harmless" if the command wrote its outputs or failed with one line, without a traceback, in 30 s with 2 GB;
if no file outside of the folder was created, changed or moved; and if no output has the content of one. With
nothing or with leftovers planted, the command must succeed, and with weights elsewhere it must fail. A link
that the user names as an output, where the command may replace the output, is followed by design, and not
planted.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from shared_embeddings.words.classes import WordClasses
from tests.commands.harness import WRITERS, Writer, content, plant
from tests.drills import commands
from tests.drills.runner import Drill, Running, Try, read_process
from tests.drills.training import script
from tests.helpers import alter, compress
from tests.lm.runs import settings
from tests.shared_embeddings.hf.models import save, shrink
from tests.shared_embeddings.hf.test_hf_errors import DAMAGES, SECRET

HARMLESS = "harmless"
SECONDS = 30
MOST_BYTES = 2 << 30
CANARY = SECRET.strip().encode()  # content of the files outside
_LM_TRAIN = "-config {inputs}/lm.yaml -data {inputs}/corpus/data -output_dir @run"
_ONMT_TRAIN = "-config {inputs}/model.yaml -save_model @run/model"
_NAMES = {
    "shared-embeddings": {
        "trim a folder": "trim --model {inputs}/folder --text {inputs}/text --output @small",
        "export": "export --model {inputs}/lm.pt --format vec --output @vectors",
        "export a folder": "export --model {inputs}/small --format dense --output @dense",
        "classes again": "classes --vectors-of {inputs}/classes.npz --num-classes 2 --output @out.npz",
    },
    "lm_train": {"lm_train": _LM_TRAIN, "lm_train from a model": f"{_LM_TRAIN} -init_from {{inputs}}/lm.pt"},
    "onmt_train": {
        "onmt_train": f"{_ONMT_TRAIN} -save_format safetensors",
        "onmt_train from a model": f"{_ONMT_TRAIN} -train_from {{inputs}}/nmt.pt",
    },
}
COMMANDS = WRITERS | {
    name: Writer(command, arguments, None)
    for command, known in _NAMES.items()
    for name, arguments in known.items()
}
# What a command writes, if not only what its options name.
WRITTEN = {
    "lm_train": "run/last.pt run/best.pt run/config.yaml run/train.log run/.lock run/tensorboard",
    "onmt_train": "run/model_step_1.pt run/model_step_1.safetensors run/.model.lock",
    "lm_prepare": "data/data.json data/train.npy data/valid.npy data/test.npy data/vocabulary.tsv",
    "trim": "small small.ids.tsv",
    "trim a translation model": "small small.ids.tsv",
}
Planting = Callable[[Path, Path], None]  # into the folder of the stranger; the second is the one outside


def written(command: str) -> list[str]:
    """Names of what a command writes."""
    return WRITTEN.get(command, "").split() or [str(path) for path in COMMANDS[command].outputs(Path())]


@cache
def inputs() -> Path:
    """A folder with the inputs of all commands."""
    folder = commands.inputs()
    save(folder / "folder", "gpt2")
    shrink("gpt2", folder / "small")
    values = settings(folder / "corpus/data", folder / "run", steps=2, evaluate_every=1)
    values |= {"embedding": {"method": "standard"}, "hidden_dim": 12}  # as lm.pt
    (folder / "lm.yaml").write_text(yaml.safe_dump(values))
    vectors = np.eye(7, 3)
    WordClasses(tuple("abcdefg"), np.arange(7) % 2, vectors[:2], vectors, {}).save(folder / "classes.npz")
    return folder


@cache
def outside() -> Path:
    """A folder with a file of the user; `drill` makes it, and the inputs, in the main thread."""
    inputs()
    kept = tempfile.TemporaryDirectory(prefix="drill-home-")
    commands._KEPT.append(kept)
    (Path(kept.name) / "precious").write_bytes(CANARY)
    return Path(kept.name)


def attempt(cases: list[tuple[str, str, Planting]], wanted: tuple[int, ...], given: Try) -> str:
    """Plant one thing and run a command; returns the outcome."""
    command, what, planting = cases[int(given.folder.name) % len(cases)]
    work, home = given.folder / "work", given.folder / "home"
    shutil.copytree(inputs(), work)
    shutil.copytree(outside(), home)
    (work / "out").mkdir()
    planting(work, home)
    before = {folder: content(folder) for folder in (work, home, inputs())}
    writer = COMMANDS[command]
    line = [script(writer.command), *writer.given(work, work / "out")]
    with Running(line, given.folder / "log") as running:
        grew = running.wait_until(lambda: peak(running.process.pid) > MOST_BYTES, SECONDS)
        status = running.process.poll()
        output = running.output()
    new = {name: data for name, data in content(work).items() if before[work].get(name) != data}
    failures = {
        "a file outside was created, changed or moved": any(
            content(folder) != before[folder] for folder in (home, inputs())
        ),
        "a file outside is in an output": any(
            CANARY in data for data in new.values() if isinstance(data, bytes)
        ),
        f"more than {MOST_BYTES >> 30} GB": grew,
        f"more than {SECONDS} s": status is None and not grew,
        "a traceback": "Traceback" in output,
        f"status {status}": status is not None and status not in wanted,
    }
    shutil.rmtree(given.folder)
    found = next((name for name, failed in failures.items() if failed), None)
    return HARMLESS if found is None else f"{found} ({command}: {what})"


def peak(process: int) -> int:
    """The largest memory of a process so far in bytes; 0 if it has ended."""
    found = re.search(r"VmHWM:\s+(\d+)", read_process(process, "status"))
    return int(found[1]) << 10 if found else 0


def leftovers(command: str, data: bytes, work: Path, home: Path) -> None:
    """Plant journals and temporary names, as files and as links, beside everything that a command writes."""
    for name in written(command):
        path = work / "out" / name
        path.parent.mkdir(exist_ok=True)
        plant(path, home, data)


def link(name: str, target: str, work: Path, home: Path) -> None:
    """Plant a link to a file outside, which may not exist."""
    path = work / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(home / target)


def claim(name: str, changed: Mapping[str, Any], work: Path, home: Path) -> None:
    """Change settings in a JSON file or in a checkpoint."""
    path = work / name
    if path.suffix == ".json":
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changed}))
    else:
        alter(path, lambda found: (vars(found["opt"]) if "opt" in found else found["config"]).update(changed))


def zeros(name: str, work: Path, home: Path) -> None:
    """Compress a file, with 3 GB of zeros."""
    compress(work / name, 48)


def damage(what: str, folder: str, work: Path, home: Path) -> None:
    """Damage a model folder, as in the tests of its errors."""
    DAMAGES[what][0](work / folder)


HUGE = 10**8
READING_FOLDERS = {"compress a folder": "gpt2", "trim a folder": "folder", "export a folder": "small"}
READING = {
    "lm.pt": ("compress a language model", "trim", "export", "lm_evaluate", "lm_train from a model"),
    "nmt.pt": (
        "compress a translation model",
        "trim a translation model",
        "onmt_translate",
        "onmt_release_model",
        "onmt_release_model to CTranslate2",
        "onmt_train from a model",
    ),
}
SIZES = {
    "lm.pt": ("num_layers", "embedding_dim", "hidden_dim"),
    "nmt.pt": ("enc_layers", "dec_layers", "hidden_size", "enc_hid_size", "transformer_ff"),
    "config.json": ("n_layer", "n_embd", "n_inner", "n_head", "n_positions", "vocab_size"),
}  # fmt: skip
WRITING = sorted(
    COMMANDS.keys() - {"onmt_characters", "onmt_rerank", "onmt_character_vocab", "classes again"}
)
CODE = {"auto_map": {"AutoTokenizer": ["other/repository--code.Tokenizer", None]}}
OUTSIDE = ("an index with a path", "an index upwards", "an index by a link", "link model.safetensors")


def drill(what: str, cases: list[tuple[str, str, Planting]], wanted: tuple[int, ...] = (0, 2)) -> Drill:
    """Try each case once."""
    return Drill(what, HARMLESS, partial(attempt, cases, wanted), len(cases), outside)


def claims() -> list[tuple[str, str, Planting]]:
    """Claims of size in every kind of model, and of code in model folders."""
    found: list[tuple[str, str, Planting]] = []
    for file, readers in READING.items():
        changes = [{name: HUGE} for name in SIZES[file]]
        changes.append({"embedding": {"method": "projective", "rank": HUGE}})
        plantings = {str(change): partial(claim, file, change) for change in changes}
        plantings["compressed zeros"] = partial(zeros, file)
        found += [(reader, what, planting) for reader in readers for what, planting in plantings.items()]
    for reader, folder in READING_FOLDERS.items():
        for name in SIZES["config.json"]:
            for value in (HUGE, -1):
                change = {name: value}
                found.append((reader, str(change), partial(claim, f"{folder}/config.json", change)))
        found.append((reader, "code of a tokenizer", partial(claim, f"{folder}/tokenizer_config.json", CODE)))
    return [*found, ("classes again", "compressed zeros", partial(zeros, "classes.npz"))]


def damaged(names: Iterable[str]) -> list[tuple[str, str, Planting]]:
    """Damages in every model folder."""
    read = READING_FOLDERS.items()
    return [(reader, name, partial(damage, name, folder)) for reader, folder in read for name in names]


DRILLS = [
    drill("nothing", [(name, "nothing", lambda work, home: None) for name in WRITING], (0,)),
    drill(
        "journals and leftovers beside outputs",
        [
            (name, str(data), partial(leftovers, name, data))
            for name in WRITING
            for data in (b'[["HOME/planted", "HOME/precious", 0]]', b"\xff")
        ],
        (0,),
    ),
    drill(
        "links as outputs, logs and locks",
        [
            (name, f"{path} to {target}", partial(link, f"out/{path}", target))
            for name in WRITING
            if name != "onmt_translate"  # always replaces its outputs, which the user names
            for path in written(name)
            for target in ("precious", "new")
        ],
    ),
    drill("weights outside of a model folder", damaged(OUTSIDE), (2,)),
    drill("damaged model folders", damaged(sorted(DAMAGES.keys() - OUTSIDE))),
    drill("claims of size and of code", claims()),
]
