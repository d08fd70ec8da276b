"""Trimming translation models: kept words keep their probabilities, and commands take the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nmt.checkpoint.checkpoint import packing_of_checkpoint
from nmt.checkpoint.files import read_checkpoint
from nmt.checkpoint.models import build_from_checkpoint
from shared_embeddings.checkpoints.storage import Packing
from shared_embeddings.cli.main import main
from tests.nmt.conftest import Host, Trained, run

pytestmark = pytest.mark.usefixtures("installed_host")

STANDARD = {"embedding": {"method": "standard", "output_bias": True}, "save_format": "safetensors"}
APART = {"share_vocab": False, "share_embeddings": False, "share_decoder_embeddings": False}
SPECIALS = ["<unk>", "<blank>", "<s>", "</s>"]
SOURCE, TARGET = "w1 w2 w39\nw2 w5\nw7 w1\n", "v1 v2 v39\nv2 v5\nv7 v1\n"


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    """Five words of each side."""
    for name, content in (("text.src", SOURCE), ("text.tgt", TARGET)):
        (tmp_path / name).write_text(content)
    return tmp_path / "text.src", tmp_path / "text.tgt"


def model_apart(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> tuple[Host, Path]:
    """A model of upstream's own with a vocabulary for each side, and three tables."""
    vocabulary = tmp_path_factory.getbasetemp() / "vocab.tgt"
    vocabulary.write_text("".join(f"v{number}\t9\n" for number in range(40)))
    return trained(tgt_vocab=str(vocabulary), **APART)


def trim(*arguments: object) -> int:
    """The exit status of the command."""
    return main(["trim", *map(str, arguments)])


def scores(path: Path) -> dict[str, torch.Tensor]:
    """The scores ``(3, T)`` of each target word but the padding in sentences of kept words."""
    model: Any
    model, vocabs, _, _ = build_from_checkpoint(str(path))
    sides = {"src": SOURCE.replace("\n", " ").split(), "tgt": TARGET.replace("\n", " ").split()}
    ids = {side: torch.tensor(vocabs[side](words)).view(1, -1, 1) for side, words in sides.items()}
    with torch.no_grad():
        hidden, _ = model(ids["src"], ids["tgt"], torch.tensor([7]))
        found = model.generator(hidden)[0]
    words = vocabs["tgt"].ids_to_tokens
    return {word: found[:, number] for number, word in enumerate(words) if word != "<blank>"}


def assert_same_scores(trimmed: Path, model: Path) -> None:
    """Kept words have the scores that they had, so that what is normalized over them is the same, too."""
    before, after = scores(model), scores(trimmed)
    assert set(after) < set(before)
    total = torch.stack([before[word] for word in after]).logsumexp(dim=0)
    own = torch.stack(list(after.values())).logsumexp(dim=0)
    for word in after:
        torch.testing.assert_close(after[word] - own, before[word] - total, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [STANDARD, {}], ids=["shared embedding", "upstream's own"])
def test_one_vocabulary(
    trained: Trained, texts: tuple[Path, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    host, model = trained(**options)
    output = tmp_path / "trimmed.pt"
    before = model.read_bytes()
    assert trim("--model", model, "--text", *texts, "--output", output) == 0
    assert model.read_bytes() == before
    words = read_checkpoint(model)["vocab"]["src"]
    kept = read_checkpoint(output)["vocab"]
    used = {*SPECIALS, *SOURCE.split(), *TARGET.split()}
    assert kept["src"] == kept["tgt"] == [word for word in words if word in used]
    pairs = [
        map(int, line.split("\t")) for line in (tmp_path / "trimmed.pt.ids.tsv").read_text().splitlines()
    ]
    assert [(words[old], kept["src"][new]) for old, new in pairs] == [(word, word) for word in kept["src"]]
    assert_same_scores(output, model)
    assert output.with_suffix(".safetensors").exists() == bool(options)
    host.write("covered", SOURCE.splitlines())
    lines = host.translate(output, source="covered")
    assert len(lines) == 3 and {word for line in lines for word in line.split()} <= used


def test_result_trains_on_is_released_and_compressed(
    trained: Trained, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    host, model = trained()
    output, small = tmp_path / "trimmed.pt", tmp_path / "small.pt"
    assert trim("--model", model, "--text", *texts, "--output", output) == 0
    further = ["-train_from", str(output), "-train_steps", "2", "-save_checkpoint_steps", "2"]
    run("onmt_train", "-config", str(host.config("further")), *further)
    words = read_checkpoint(output)["vocab"]["tgt"]
    assert read_checkpoint(host.folder / "further_step_2.pt")["vocab"]["tgt"] == words
    run("onmt_release_model", "-model", str(output), "-output", str(tmp_path / "released.pt"))
    squeeze = ["compress", "--model", output, "--method", "projective", "--rank", 4, "--output", small]
    assert main([str(argument) for argument in squeeze]) == 0
    again = tmp_path / "again.pt"
    assert trim("--model", small, "--text", texts[1], "--output", again) == 0
    assert len(read_checkpoint(again)["vocab"]["tgt"]) == len(SPECIALS) + 5
    host.write("covered", TARGET.splitlines())
    assert len(host.translate(again, source="covered")) == 3


def test_two_vocabularies(
    trained: Trained,
    texts: tuple[Path, Path],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:
    host, model = model_apart(trained, tmp_path_factory)
    output, keep = tmp_path / "trimmed.pt", tmp_path / "keep"
    keep.write_text("w30\nv31\n")
    asked = ["--model", model, "--output", output]
    for given, wanted in (
        (["--text", *texts], "give --source-text and --target-text"),
        (["--source-text", texts[0]], "give --target-text"),
    ):
        capsys.readouterr()
        assert trim(*asked, *given) == 2
        lines = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("shared-embeddings")
        ]
        assert len(lines) == 1 and wanted in lines[0]
    assert trim(*asked, "--source-text", texts[0], "--target-text", texts[1], "--keep", keep) == 0
    vocabulary = read_checkpoint(output)["vocab"]
    # The source vocabulary has words of both sides.
    assert set(vocabulary["src"]) == {*SPECIALS, *SOURCE.split(), "w30", "v31"}
    assert set(vocabulary["tgt"]) == {*SPECIALS, *TARGET.split(), "v31"}
    for side, words in (("source", vocabulary["src"]), ("target", vocabulary["tgt"])):
        assert len((tmp_path / f"trimmed.pt.{side}.ids.tsv").read_text().splitlines()) == len(words)
    assert_same_scores(output, model)
    host.write("covered", SOURCE.splitlines())
    assert len(host.translate(output, source="covered")) == 3


def packing(path: Path) -> Packing | None:
    """How the weights of a checkpoint are stored."""
    return packing_of_checkpoint(str(path), read_checkpoint(path))


@pytest.mark.slow_except("safetensors-int4")
@pytest.mark.parametrize(("save_format", "store"), [("pytorch", "int8"), ("safetensors", "int4")])
def test_packed_models_stay_packed(
    save_format: str, store: str, trained: Trained, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    _, model = trained(embedding=STANDARD["embedding"], save_format=save_format)
    small, output = tmp_path / "small.pt", tmp_path / "trimmed.pt"
    squeeze = ["compress", "--method", "projective", "--rank", "6", "--store", store]
    assert main([*squeeze, "--model", str(model), "--output", str(small)]) == 0
    assert trim("--model", small, "--text", *texts, "--output", output) == 0
    before, after = (packing(path) for path in (small, output))
    assert before is not None and before.store == store
    assert after is None  # what is left of this table has fewer values than are packed
    assert trim("--model", small, "--text", *texts, "--keep-first", 60, "--output", tmp_path / "more.pt") == 0
    after = packing(tmp_path / "more.pt")
    assert after is not None and after.store == store
    assert_same_scores(output, small)
    assert_same_scores(tmp_path / "more.pt", small)


def test_both_sides_of_one_vocabulary_need_a_text(
    trained: Trained, texts: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, model = trained(**STANDARD)
    asked = ["--model", model, "--output", tmp_path / "trimmed.pt"]
    assert trim(*asked, "--source-text", texts[0]) == 2
    assert "selects the words of the target" in capsys.readouterr().err
    assert trim(*asked, "--source-text", texts[0], "--target-text", texts[1]) == 0
