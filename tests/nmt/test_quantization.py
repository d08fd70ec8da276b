"""Translation models whose tables are rounded in training."""

from __future__ import annotations

import torch

from nmt.checkpoint.checkpoint import read_weights
from tests.nmt.conftest import Host, Refusal

STANDARD = {"method": "standard"}
ROUNDED = {"bits": 1, "codec": "lloyd_max"}


def test_tables_are_rounded_in_training_and_resumed(host: Host) -> None:
    plain = host.train("plain", embedding=STANDARD, train_steps=4)
    late = host.train(
        "late", embedding=STANDARD, train_steps=4, embedding_quantization={**ROUNDED, "quantize_from_step": 4}
    )
    whole = host.train("whole", embedding=STANDARD, train_steps=4, embedding_quantization=ROUNDED)
    first = host.train("parts", embedding=STANDARD, train_steps=2, embedding_quantization=ROUNDED)
    parts = host.train(
        "parts", "-train_from", str(first), embedding=STANDARD, train_steps=4, embedding_quantization=ROUNDED
    )
    bodies = [read_weights(str(path))[1] for path in (plain, late, whole, parts)]
    assert len({tuple(body) for body in bodies}) == 1
    for name, tensor in bodies[0].items():
        assert torch.equal(tensor, bodies[1][name]), name
        torch.testing.assert_close(bodies[2][name], bodies[3][name])
    assert any(not torch.equal(tensor, bodies[2][name]) for name, tensor in bodies[0].items())


def test_wrong_settings(host: Host, refusal: Refusal) -> None:
    for given, embedding, reason in (
        ("[1]", STANDARD, "embedding_quantization: '[1]' is not a mapping; write it like {bits: 2"),
        ("{bitz: 1}", STANDARD, "embedding_quantization: unknown option 'bitz'"),
        ("{bits: 1}", {"method": "projective", "rank": 2}, "but the embedding is projective"),
        ("{bits: 1}", None, "embedding_quantization: has no effect without `embedding`"),
    ):
        config = host.config("model", embedding=embedding)
        line = refusal("onmt_train", "-config", str(config), "-embedding_quantization", given)
        assert reason in line
