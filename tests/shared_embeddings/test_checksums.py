"""Checksums of checkpoints: what they cover, and what they must not depend on."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_embeddings.checkpoints.checksums import (
    load_safetensors,
    recorded_checksum,
    save_safetensors,
    stamp_safetensors,
    state_digest,
    verified,
    with_checksum,
)
from shared_embeddings.errors import UserError


def content() -> dict[str, Any]:
    """What checkpoints hold, and more."""
    return {
        "model": {
            "a.weight": torch.arange(12.0).reshape(3, 4),
            "ids": torch.tensor([3, 1], dtype=torch.int16),
        },
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
        "single": torch.tensor(0.25, dtype=torch.float64),
        "opt": Namespace(rate=0.1, names=["x", "ü"], kinds={"q", "r"}, size=None),
        "words": ["<unk>", "word", "\u1c89"],
        "numbers": {1: (1, 2.5, float("nan")), "1": True},
        "raw": b"\x00\xff",
    }


def test_the_digest_survives_storage(tmp_path: Path) -> None:
    torch.serialization.add_safe_globals([Namespace])
    torch.save(content(), tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", weights_only=True)
    mapped = torch.load(tmp_path / "file.pt", weights_only=True, mmap=True)
    assert state_digest(content()) == state_digest(loaded) == state_digest(mapped)


def test_the_digest_is_of_the_content_not_of_its_layout() -> None:
    table = torch.arange(12.0).reshape(3, 4)
    same = [
        {"a": table, "b": torch.zeros(2)},
        {"b": torch.zeros(2), "a": table},
        OrderedDict(a=table.T.contiguous().T, b=torch.zeros(4)[::2]),
        {"a": torch.nn.Parameter(table), "b": torch.zeros(1).expand(2)},
    ]
    assert len({state_digest(state) for state in same}) == 1


CHANGES = {
    "name": lambda c: c["model"].update(b=c["model"].pop("ids")),
    "bytes": lambda c: c["model"]["a.weight"].view(torch.uint8)[2].__setitem__(5, 7),
    "negative zero": lambda c: c["model"]["a.weight"].__setitem__((0, 0), -0.0),
    "shape": lambda c: c["model"].update({"a.weight": c["model"]["a.weight"].reshape(4, 3)}),
    "type": lambda c: c["model"].update(ids=c["model"]["ids"].view(torch.bfloat16)),
    "empty shape": lambda c: c.update(none=torch.empty(3, 0)),
    "word": lambda c: c["words"].__setitem__(1, "ward"),
    "option": lambda c: setattr(c["opt"], "rate", 0.2),
    "set": lambda c: c["opt"].kinds.add("s"),
    "number": lambda c: c["numbers"].update({1: (1, 2.25, float("nan"))}),
    "kind of number": lambda c: c["numbers"].update({"1": 1}),
    "border": lambda c: c.update(words=["<unk>wo", "rd", "\u1c89"]),
    "nesting": lambda c: c.update(words=[["<unk>", "word"], "\u1c89"]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_shows(change: Any) -> None:
    stored = with_checksum(content())
    change(stored)
    with pytest.raises(UserError, match=r"^file x: does not match its checksum.*SHARED_EMBEDDINGS_VERIFY=0"):
        verified(stored, "file x")


def test_what_has_no_bytes_has_a_digest() -> None:
    odd = {"a": torch.eye(3).to_sparse(), "b": torch.empty(2, device="meta"), "c": Path("x")}
    assert len(state_digest(odd)) == 64


def test_verification_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {**with_checksum(content()), "words": []}
    monkeypatch.setenv("SHARED_EMBEDDINGS_VERIFY", "0")
    assert verified(stored, "x")["words"] == []


def test_a_checkpoint_without_a_checksum_passes() -> None:
    assert verified({"a": 1}, "x") == {"a": 1}


def test_safetensors_carry_their_checksum(tmp_path: Path) -> None:
    path, plain = tmp_path / "own.safetensors", tmp_path / "other.safetensors"
    tensors = {"a": torch.arange(9.0), "b": torch.tensor([1, 2], dtype=torch.uint8)}
    assert save_safetensors(tensors, path) == recorded_checksum(path) == state_digest(tensors)
    from safetensors import safe_open
    from safetensors.torch import save_file

    save_file(tensors, plain, {"format": "pt", "maker": "another program"})
    assert recorded_checksum(plain) is None
    assert load_safetensors(plain, "x")["a"].tolist() == list(range(9))
    stamp_safetensors(plain)
    assert recorded_checksum(plain) == recorded_checksum(path)
    with safe_open(plain, "pt") as opened:
        assert opened.metadata()["maker"] == "another program" and opened.metadata()["format"] == "pt"
    assert sorted(file.name for file in tmp_path.iterdir()) == [plain.name, path.name]


def test_every_flipped_byte_of_safetensors_shows(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_safetensors({"a": torch.arange(9.0), "b": torch.tensor([1, 2], dtype=torch.uint8)}, path)
    good = path.read_bytes()
    begin = 8 + int.from_bytes(good[:8], "little")
    for offset in range(begin, len(good)):
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        with pytest.raises(UserError, match="^weights"):
            load_safetensors(path, "weights")


def test_the_digest_of_one_tensor_follows_its_definition() -> None:
    tensor = torch.tensor([[1.0, 2.0]])
    own = hashlib.sha256(b"torch.float32 (1, 2) torch.strided" + tensor.numpy().tobytes()).digest()
    parts = [b"mapping of 1", b"str a", own]
    whole = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts))
    assert state_digest({"a": tensor}) == whole.hexdigest()
