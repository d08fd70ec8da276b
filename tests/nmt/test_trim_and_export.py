"""Trimming translation models, and export to CTranslate2, OpenNMT-py and its server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nmt.checkpoints import packing_of_checkpoint, read_checkpoint
from nmt.embeddings import shared_embeddings_of
from nmt.models import build_from_checkpoint, dense_checkpoint, describe_checkpoint
from shared_embeddings.cli.main import main
from shared_embeddings.quant.packed_tensor import PackedTensor
from shared_embeddings.quant.storage import Packing
from shared_embeddings.words.classes import WordClasses
from tests.nmt.conftest import FUNNEL, SECONDS, Capture, ErrorLine, Host, Trained, run

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
    """Kept words have the same scores, so probabilities normalized over them are also the same."""
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
    asked = ["--model", model, "--output", output]
    assert trim(*asked, "--source-text", texts[0]) == 2  # and no words of the target
    assert trim(*asked, "--source-text", texts[0], "--target-text", texts[1]) == 0
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


def test_result_can_be_trained_released_and_compressed(
    trained: Trained, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    host, model = trained()
    output, small = tmp_path / "trimmed.pt", tmp_path / "small.pt"
    assert trim("--model", model, "--text", *texts, "--output", output) == 0
    further = ["-train_from", str(output), "-train_steps", "2", "-save_checkpoint_steps", "2"]
    run("onmt_train -config", host.config("further"), *further)
    words = read_checkpoint(output)["vocab"]["tgt"]
    assert read_checkpoint(host.folder / "further_step_2.pt")["vocab"]["tgt"] == words
    run("onmt_release_model -model", output, "-output", tmp_path / "released.pt")
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
    capsys: Capture,
) -> None:
    """Of a plain upstream model with three tables."""
    vocabulary = tmp_path_factory.getbasetemp() / "vocab.tgt"
    vocabulary.write_text("".join(f"v{number}\t9\n" for number in range(40)))
    host, model = trained(tgt_vocab=str(vocabulary), **APART)
    output, keep = tmp_path / "trimmed.pt", tmp_path / "keep"
    keep.write_text("w30\nv31\n")
    asked = ["--model", model, "--output", output]
    for given, wanted in (
        (["--text", *texts], "give --source-text and --target-text"),
        (["--source-text", texts[0]], "give --target-text"),
    ):
        assert trim(*asked, *given) == 2
        lines = capsys.readouterr().err.splitlines()
        assert [wanted in line for line in lines if line.startswith("shared-embeddings")] == [True]
    assert trim(*asked, "--source-text", texts[0], "--target-text", texts[1], "--keep", keep) == 0
    found = read_checkpoint(output)["vocab"]
    # The source vocabulary has words of both sides.
    assert set(found["src"]) == {*SPECIALS, *SOURCE.split(), "w30", "v31"}
    assert set(found["tgt"]) == {*SPECIALS, *TARGET.split(), "v31"}
    for side, words in (("source", found["src"]), ("target", found["tgt"])):
        assert len((tmp_path / f"trimmed.pt.{side}.ids.tsv").read_text().splitlines()) == len(words)
    assert_same_scores(output, model)
    host.write("covered", SOURCE.splitlines())
    assert len(host.translate(output, source="covered")) == 3


def packing(path: Path) -> Packing | None:
    """How the weights of a checkpoint are stored."""
    return packing_of_checkpoint(str(path), read_checkpoint(path))


@pytest.mark.slow_except("safetensors-int8")
@pytest.mark.parametrize(("save_format", "store"), [("pytorch", "int8"), ("safetensors", "int8")])
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
    assert after is None  # the remaining table is too small to be packed
    assert trim("--model", small, "--text", *texts, "--keep-first", 60, "--output", tmp_path / "more.pt") == 0
    after = packing(tmp_path / "more.pt")
    assert after is not None and after.store == store
    assert_same_scores(output, small)
    assert_same_scores(tmp_path / "more.pt", small)


def ctranslate2_lines(ctranslate2: Any, model: Path, host: Host) -> list[str]:
    """The greedy translations of the test set by an exported model.

    It computes in float32: products in int8 also round the hidden states, by rules of the processor.
    """
    sources = [line.split() for line in (host.folder / "test.src").read_text().splitlines()]
    search = {"beam_size": 1, "max_decoding_length": 9, "min_decoding_length": 3}
    translator = ctranslate2.Translator(str(model), compute_type="float32")
    results = translator.translate_batch(sources, **search)
    return [" ".join(result.hypotheses[0]) for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [True, False], ids=["three-way", "inputs apart"])
def test_ctranslate2_translates_the_same(sharing: bool, host: Host, capsys: Capture) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    checkpoint = host.train("model", embedding=FUNNEL, share_embeddings=sharing, train_steps=60)
    exported = host.folder / "exported"
    for _ in range(2):  # the second replaces the first, including all its files
        run("onmt_release_model -format ctranslate2 -force -model", checkpoint, "-output", exported)
    assert f"times the checkpoint ({checkpoint.stat().st_size:,} bytes)" in capsys.readouterr().out
    ours = host.translate(checkpoint, "-beam_size", "1", "-min_length", "3")
    assert ctranslate2_lines(ctranslate2, exported, host) == ours and all(ours)


@pytest.mark.slow
def test_ctranslate2_keeps_the_codes_of_a_table_in_int8(host: Host) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    checkpoint = host.train("model", embedding={"method": "standard"}, train_steps=20)
    small, exported = host.folder / "small.pt", host.folder / "exported"
    files = ["--model", str(checkpoint), "--output", str(small)]
    assert main(["compress", "--method", "standard", "--store", "int8", *files]) == 0
    run("onmt_release_model -format ctranslate2 -quantization int8 -model", small, "-output", exported)
    (embedding,) = shared_embeddings_of(build_from_checkpoint(str(small))[0])
    (table,) = [part for part in embedding.parameters() if isinstance(part, PackedTensor)]
    assert (exported / "model.bin").read_bytes().count(table.packed.codes.numpy().tobytes()) == 1
    theirs = ctranslate2_lines(ctranslate2, exported, host)
    ours = host.translate(small, "-beam_size", "1", "-min_length", "3")
    assert theirs == ours


@pytest.mark.parametrize("kind", ["tied", "output"])
def test_export_keeps_the_bias_of_the_output(kind: str, host: Host) -> None:
    settings = {"method": "standard", "output_bias": True}
    tied, own = {"embedding": settings}, {"output_embedding": settings, **APART, "share_vocab": True}
    checkpoint = host.train("model", **(tied if kind == "tied" else own), train_steps=20)
    model, plain = build_from_checkpoint(str(checkpoint))[0], dense_checkpoint(str(checkpoint))
    assert plain["opt"].embedding is None and plain["opt"].output_embedding is None
    head = plain["generator"]
    hidden = torch.randn(3, head["weight"].size(1))
    assert model.generator.embedding.bias.abs().max() > 0
    torch.testing.assert_close(F.linear(hidden, **head), model.generator(hidden))


@pytest.mark.parametrize("options", [{}, {"num_classes": 9, "class_dims": [10]}], ids=["file", "sizes"])
def test_classes_are_part_of_the_checkpoint(
    options: dict[str, Any], host: Host, error_line: ErrorLine
) -> None:
    """A class file is read when training starts, and not needed afterwards."""
    words = [*(f"w{number}" for number in range(40)), *(f"v{number}" for number in range(40))]
    generator = np.random.default_rng(0)
    file = host.folder / "classes.npz"
    WordClasses(
        tuple(words),
        np.arange(80) % 9,
        generator.normal(size=(9, 3)).astype(np.float32),
        generator.normal(size=(80, 3)).astype(np.float32),
    ).save(file)
    embedding = {"method": "uncle", "unique_dim": 6, "classes": str(file), **options}
    checkpoint = host.train("model", embedding=embedding, train_steps=3)
    config = host.config("model", embedding=embedding)
    model, vocabs, *_ = build_from_checkpoint(str(checkpoint))
    (found,) = shared_embeddings_of(model)
    assert int(found.classes[vocabs["src"]["v5"]]) == 45 % 9
    file.unlink()
    assert len(host.translate(checkpoint)) == 7
    run("onmt_train -config", config, "-train_from", checkpoint)
    assert describe_checkpoint(host.folder / "model_step_6.pt")["config"]["embedding"]["classes"] == "stored"
    message = error_line("onmt_train -config", host.config("other", embedding=embedding))
    assert "classes.npz" in message and "no such file" in message


RECURRENT = {"encoder_type": "rnn", "decoder_type": "rnn", "position_encoding": False, "train_steps": 1}
ADAPTIVE = {"embedding": {"method": "adaptive", "cutoffs": [20], "factor": 2}}


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (RECURRENT, "transformer"),
        (ADAPTIVE, "adaptive"),
        ({"copy_attn": True}, "copy_attn: true"),
        ({"decoder_positions": ["ldpe"]}, "decoder_positions: ldpe"),
    ],
)
def test_ctranslate2_rejects_unsupported_models(
    options: dict[str, Any], printed: str, host: Host, error_line: ErrorLine
) -> None:
    checkpoint = host.train("model", **{"embedding": FUNNEL, **options})
    output = host.folder / "exported"
    line = error_line("onmt_release_model -format ctranslate2 -model", checkpoint, "-output", output)
    assert printed in line and not output.exists()


@pytest.mark.slow
def test_checkpoint_of_plain_upstream(host: Host) -> None:
    """A model that OpenNMT-py alone trained and saved loads, translates, averages and resumes."""
    import pyonmttok

    if pyonmttok.__spec__.origin is None:
        pytest.skip("upstream alone needs pyonmttok")
    config = host.config("plain", train_steps=3)
    upstream = [sys.executable, "-m", "onmt.bin.train", "-config", str(config)]
    subprocess.run(upstream, check=True, capture_output=True, timeout=SECONDS)
    checkpoint = host.folder / "plain_step_3.pt"
    assert "resume" not in read_checkpoint(checkpoint)
    assert len(host.translate(checkpoint)) == 7
    run("onmt_average_models -models", checkpoint, "-output", host.folder / "mean.pt")
    assert host.translate(host.folder / "mean.pt") == host.translate(checkpoint)
    run("onmt_train -config", host.config("plain", train_steps=4), "-train_from", checkpoint)
    model, *_ = build_from_checkpoint(str(host.folder / "plain_step_4.pt"))
    assert model.generator.weight is model.decoder.embeddings.word_lut.weight


UPSTREAM_TESTS = (
    "attention beam_search copy_generator embeddings greedy_search models structured_attention text_utils "
    "translator"
).split()

# Uses the source length of hypothesis b for sentence b.
WRONG = "not test_beam_returns_attn_with_correct_length"


@pytest.mark.slow
def test_upstream_tests_pass_with_the_patches(tmp_path: Path) -> None:
    """OpenNMT's own tests (those that need no data of its repository), with all patches applied."""
    import onmt

    (tmp_path / "conftest.py").write_text("from nmt.hooks import apply_patches\napply_patches()\n")
    folder = Path(onmt.__file__).parent / "tests"
    for name in [*(f"test_{name}.py" for name in UPSTREAM_TESTS), "utils_for_tests.py"]:
        shutil.copy(folder / name, tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", WRONG, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:]
