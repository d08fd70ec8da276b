"""Checkpoints of which a test changes something."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nmt.checkpoint.files import allow_checkpoint_types
from shared_embeddings.checkpoints.checksums import KEY, with_checksum


def alter(path: Path, change: Callable[[dict[str, Any]], object], target: Path | None = None) -> Path:
    """Change the content of a checkpoint, with a checksum that fits where it had one; returns its path."""
    allow_checkpoint_types()
    content = torch.load(path, map_location="cpu", weights_only=True)
    change(content)
    target = target or path
    torch.save(with_checksum(content) if KEY in content else content, target)
    return target


class Odd:
    """Values that stand where a part of a checkpoint was."""

    VALUES: dict[str, Any] = {
        "None": None,
        "a list": [1, None],
        "a string": "odd",
        "a number": 5,
        "a tensor": torch.zeros(2),
        "an empty mapping": {},
        "a mapping of numbers": {1: 2},
        "a mapping of None": {"a": None},
    }

    @staticmethod
    def tensors(state: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
        """States of which the first floating-point table is another one, or is none."""
        name = next(
            name for name, tensor in state.items() if tensor.dim() == 2 and tensor.is_floating_point()
        )
        table = state[name]
        odd = {
            "longer": torch.cat([table, table]),
            "one axis": table.flatten(),
            "empty": table[:0],
            "sparse": table.to_sparse(),
            "meta": table.to("meta"),
            "NaN": table * float("nan"),
            "infinite": table + float("inf"),
            "a list": table.tolist(),
            "None": None,
        }
        changed = {kind: {**state, name: tensor} for kind, tensor in odd.items()}
        left_out = {key: tensor for key, tensor in state.items() if key != name}
        return {
            **changed,
            "left out": left_out,
            "left over": {**state, "more": table},
            "no names": {0: table},
        }


def told(error: str, program: str, path: Path) -> bool:
    """Whether what a command printed on stderr ends in one line that names a file."""
    lines = [line for line in error.splitlines() if line.startswith(f"{program}: ")]
    return len(lines) == 1 and error.count("Traceback") == 0 and str(path) in lines[0] and len(lines[0]) < 900


def offsets(file: Path) -> list[int]:
    """An offset in the bytes of every tensor of a file: the first, in the middle or the last, in turn."""
    data = file.read_bytes()
    if file.suffix == ".safetensors":
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
            entries = [one for one in archive.infolist() if "/data/" in one.filename]
            spans = []
            for one in entries:
                name, extra = (
                    int.from_bytes(data[one.header_offset + at : one.header_offset + at + 2], "little")
                    for at in (26, 28)
                )
                begin = one.header_offset + 30 + name + extra
                spans.append((begin, begin + one.file_size))
    filled = [(begin, end) for begin, end in spans if end > begin]
    return [(begin, (begin + end) // 2, end - 1)[turn % 3] for turn, (begin, end) in enumerate(filled)]


def flip(file: Path, offset: int) -> None:
    """Change one bit of a file."""
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 1]))
