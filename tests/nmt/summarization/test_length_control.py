"""Length control through OpenNMT's commands."""

from __future__ import annotations

from tests.nmt.conftest import Host

ALONE = {"method": "alone", "base_dim": 8, "hidden_dim": 16, "codebooks": 2, "codebook_size": 4}


def test_thin(host: Host) -> None:
    checkpoint = host.train("model", embedding=ALONE, decoder_positions=["pe", "lrpe"])
    lines = host.translate(checkpoint, "-desired_length", "3")
    assert len(lines) == 7
