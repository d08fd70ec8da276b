"""Example options of methods, the sizes of recipes' rows, traps for code, and changed checkpoints."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import nmt.checkpoints  # noqa: F401  # lets torch read the options
import shared_embeddings as se
from shared_embeddings.checkpoints import KEY, with_checksum
from shared_embeddings.cli import main as cli
from shared_embeddings.compress.measure import Samples, ScoredWords
from shared_embeddings.compress.session import Session
from shared_embeddings.registry import get_method_config
from shared_embeddings.spec import Options

if TYPE_CHECKING:
    from recipes.common.recipe import Row

SEED = 20201119
# A method that rounds to codes, with its options.
CODES = ("quantized", "--bits", 2, "--codec", "trellis")


def example(method: str, num_embeddings: int, embedding_dim: int) -> Options:
    """The first example of a method for V words in D dimensions."""
    return next(iter(get_method_config(method).presets(num_embeddings, embedding_dim).examples.values()))


def as_method(method: str, options: Options) -> str:
    """A method with its options as a value of ``--method``."""
    return json.dumps({"method": method, **options})


def times_fewer(row: Row, words: int) -> float:
    """How many times fewer parameters than a plain table of V words the embedding of a row has."""
    dim = row.train.get("embedding_dim") or row.train["hidden_size"]
    files = get_method_config(row.embedding["method"]).file_options  # they need not exist
    options = {key: se.STORED if key in files else value for key, value in row.embedding.items()}
    return float(words * dim / se.num_parameters(num_embeddings=words, embedding_dim=dim, **options))


HOSTS = {
    "hf": "shared_embeddings.hf.adapter:FolderAdapter",
    "lm": "lm.adapter:LanguageModelAdapter",
    "nmt": "nmt.adapter:TranslationAdapter",
    "static": "shared_embeddings.static.adapter:StaticAdapter",
    "vectors": "shared_embeddings.word_vectors.adapter:WordVectorsAdapter",
}


def hosts_of_this_tree(group: str) -> list[EntryPoint]:
    """The adapters of this source tree, whatever is installed."""
    return [EntryPoint(name, place, group) for name, place in HOSTS.items()]


def content(folder: Path) -> dict[str, object]:
    """The content of a folder: contents of files, targets of links, and modes of the rest."""
    entries: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            entries[name] = os.readlink(path)
        else:
            entries[name] = path.read_bytes() if path.is_file() else path.stat().st_mode
    return entries


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


class Trap:
    """Texts and values that leave a mark if they are executed."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "mark"
        (folder / "planted.py").write_text(
            f"import pathlib\npathlib.Path({str(self.mark)!r}).touch()\nf = print\n"
        )
        # To importlib.metadata it is an installed package.
        (folder / "planted-1.0.dist-info").mkdir()
        (folder / "planted-1.0.dist-info" / "METADATA").write_text("Name: planted\nVersion: 1.0\n")
        self.shell = f"$(touch {self.mark})"
        # Also for a shell, inside quotation marks.
        self.python = f"__import__('pathlib').Path({str(self.mark)!r}).touch() or {{'mode': '{self.shell}'}}"
        self.yaml = f"!!python/object/apply:os.mkdir [{str(self.mark)!r}]"
        self.module = "planted.f"
        self.texts = (self.python, self.yaml, self.shell, self.module, "planted")
        self.bomb = Bomb(self.mark)


def alter(path: Path, change: Callable[[dict[str, Any]], object], target: Path | None = None) -> Path:
    """Change the content of a checkpoint and update its checksum, if any; returns its path."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    change(content)
    target = target or path
    torch.save(with_checksum(content) if KEY in content else content, target)
    return target


def names_file(error: str, program: str, path: Path) -> bool:
    """Whether what a command printed on stderr ends in one line that names a file."""
    lines = [line for line in error.splitlines() if line.startswith(f"{program}: ")]
    return len(lines) == 1 and error.count("Traceback") == 0 and str(path) in lines[0] and len(lines[0]) < 900


def offsets(file: Path) -> list[int]:
    """An offset in the bytes of every tensor of a file: the first, in the middle or the last, in turn."""
    data = file.read_bytes()
    if not zipfile.is_zipfile(file):  # safetensors
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        spans = [
            (8 + length + begin, 8 + length + end)
            for name, entry in header.items()
            if name != "__metadata__"
            for begin, end in [entry["data_offsets"]]
        ]
    else:
        with zipfile.ZipFile(file) as archive:
            entries = [member for member in archive.infolist() if "/data/" in member.filename]
            spans = []
            for member in entries:
                name, extra = (
                    int.from_bytes(data[member.header_offset + at : member.header_offset + at + 2], "little")
                    for at in (26, 28)
                )
                begin = member.header_offset + 30 + name + extra
                spans.append((begin, begin + member.file_size))
    filled = [(begin, end) for begin, end in spans if end > begin]
    return [(begin, (begin + end) // 2, end - 1)[turn % 3] for turn, (begin, end) in enumerate(filled)]


def flip(file: Path, offset: int) -> None:
    """Change one bit of a file."""
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 1]))


@torch.no_grad()
def best_words(samples: Samples) -> torch.Tensor:
    """The most probable words ``(n,)`` of all predictions."""
    return torch.cat([batch.scores.argmax(dim=1) for batch in samples.batches()])


def every_word(opened: Session) -> ScoredWords:
    """All words of a model, each for itself."""
    ids = torch.arange(len(opened.tables[0].table))
    return ScoredWords(ids, torch.zeros(len(ids)), len(ids))


def main(arguments: list[str]) -> int:
    """The exit status of ``shared-embeddings``, also where its parser exits."""
    try:
        return cli.main(arguments)
    except SystemExit as end:
        return int(str(end.code))
