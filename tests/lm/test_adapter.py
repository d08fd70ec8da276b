"""Trained language models in `compress`, and its search for a method, a codec and a size."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shared_embeddings as se
from lm import models
from lm.adapter import TrainedLanguageModel
from lm.checkpoint import load_model, save_model, save_state
from lm.data.corpus import load_corpus
from shared_embeddings.accounting import distinct_state
from shared_embeddings.compress import search, session
from shared_embeddings.compress.measure import Comparison, Quality, Retention, Validation
from shared_embeddings.compress.options import CompressOptions, MaxLoss
from shared_embeddings.compress.search import Trial
from shared_embeddings.compress.session import Session
from shared_embeddings.compress.sizing import Target
from shared_embeddings.fitting.task import FitTask
from shared_embeddings.modules.quantized import QuantizedEmbedding
from shared_embeddings.quant.packed_tensor import PackedTensor
from shared_embeddings.quant.storage import HEADER, pack
from shared_embeddings.spec import Candidate
from tests.helpers import alter, best_words
from tests.lm.runs import Ended, command, compress, settings, small_corpus, tool, write_corpus, write_model
from tests.lm.runs import run as train

pytestmark = pytest.mark.usefixtures("installed_host")

WORDS = " ".join(f"w{number}" for number in range(60))
FEW, LINES = "a b c d e f g h i j", "a c e\nc i\na a e\n"
NUM_WORDS, DIM, MAP = 120, 12, 8
DEFINE = {"map_dim": MAP, "expand_dim": 24, "depth": 2, "max_groups": 2, "output_bias": True}


def wide_model(path: Path, words: int = 400, dimension: int = 16, **settings: object) -> Path:
    """A checkpoint of an untrained model in which the table is most of the weights; gives its path."""
    torch.manual_seed(3)
    options = {"embedding_dim": dimension, "hidden_dim": 12, "num_layers": 2}
    config = {"model": "awd_lstm", "embedding": {"method": "standard", **settings}, **options}
    vocabulary = ["<eos>", "<unk>", *(f"w{number}" for number in range(words - 2))]
    model = models.build("awd_lstm", vocabulary, config["embedding"], options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    save_model(path, model, vocabulary, config, None)
    return path


def scores(path: Path) -> torch.Tensor:
    """The log-probabilities of a generated text."""
    model = load_model(path).model
    ids = torch.randint(model.embedding.num_embeddings, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model.embedding.log_prob(model(ids, model.initial_state(2)).hidden)


def evaluated(model: Path, data: Path, *arguments: object) -> float:
    """The output of ``lm_evaluate``."""
    record = model.parent / "record.json"
    asked = ["-model", model, "-data", data, "-output", record, "-force"]
    assert command("lm_evaluate", *asked, *arguments).status == 0
    return float(json.loads(record.read_text())["metrics"]["perplexity"])


@pytest.mark.slow_except("fp32-awd_lstm")
@pytest.mark.parametrize("kind", ["awd_lstm", "transformer_xl"])
@pytest.mark.parametrize("store", ["fp32", "int8"])
def test_perplexity_is_that_of_lm_evaluate(tmp_path: Path, kind: str, store: str) -> None:
    data, text = write_corpus(tmp_path / "corpus", WORDS), tmp_path / "corpus" / "test.txt"
    model = write_model(tmp_path / "model.pt", data, kind)
    small, report = tmp_path / "small.pt", tmp_path / "report"
    asked = ["--rank", 5, "--store", store, "--validation", text, "--report", report]
    ended = compress(model, "projective", small, *asked)
    quality = json.loads(report.read_text())["quality"]
    before, after = evaluated(model, text), evaluated(small, text)
    assert quality["measure"] == "perplexity" and str(text) in quality["how"]
    assert quality["before"] == pytest.approx(before, rel=1e-6)
    assert quality["after"] == pytest.approx(after, rel=1e-6)
    assert abs(before - after) > 0.001 * before
    (line,) = (line for line in ended.out.splitlines() if line.startswith("perplexity"))
    assert line.startswith(f"perplexity {after:.2f}, {before:.2f} before (")
    # Of a prepared corpus, the validation text.
    assert compress(model, "standard", small, "--validation", data, "--report", report, "--force").status == 0
    quality = json.loads(report.read_text())["quality"]
    wanted = evaluated(model, data, "-split", "valid")
    assert quality["before"] == quality["after"] == pytest.approx(wanted, rel=1e-6)


@torch.no_grad()
def test_agreement_compares_next_words_after_equal_words(tmp_path: Path) -> None:
    """Of one line of 40 tokens, whose last one has no next word."""
    model = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus", WORDS))
    report = tmp_path / "report.json"
    drawn = [f"w{number * 7 % 60}" for number in range(39)]
    (tmp_path / "line").write_text(" ".join(drawn) + "\n")
    asked = ["--rank", 4, "--text", tmp_path / "line", "--report", report]
    assert compress(model, "projective", tmp_path / "small.pt", *asked).status == 0
    agreement = json.loads(report.read_text())["kept"]
    agreed = asked = 0.0
    before, after = (load_model(path).model.eval() for path in (model, tmp_path / "small.pt"))
    words = load_model(model).words
    ids = [words.index(word) for word in [*drawn, "<eos>"]]
    for place in range(39):
        read = torch.tensor([ids[: place + 1]])
        scores = [
            known.embedding.log_prob(known(read, known.initial_state(1)).hidden[0, -1]).exp()
            for known in (before, after)
        ]
        weight = float(scores[0].max())
        asked += weight
        agreed += weight * float(scores[0].argmax() == scores[1].argmax())
    assert 0.05 < agreement["share"] < 0.95
    assert agreement["share"] == pytest.approx(agreed / asked, abs=1e-4)


@pytest.mark.slow_except("awd_lstm")
@pytest.mark.parametrize("kind", ["awd_lstm", "transformer_xl"])
def test_generated_text_depends_on_the_seed(tmp_path: Path, kind: str) -> None:
    path = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus", WORDS), kind)
    opened = TrainedLanguageModel(path)
    first, again, other = (best_words(opened.samples(None, seed, 1000)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len(first) == 1000 and len(first.unique()) > 5
    assert not opened.module.training


def test_diverged_models_have_no_quality(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "corpus", WORDS)
    opened = TrainedLanguageModel(write_model(tmp_path / "model.pt", data))
    for parameter in opened.module.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    for texts in (None, [tmp_path / "corpus" / "test.txt"]):
        with pytest.raises(ValueError, match="not finite|no numbers|are NaN"):
            best_words(opened.samples(texts, 1, 1000))
            raise ValueError(Comparison(opened, None, texts, 1).result()[1].how)


@pytest.mark.parametrize("store", ["fp32", "fp16", "int8"])
def test_the_output_bias_is_copied_and_stored_in_fp16(tmp_path: Path, store: str) -> None:
    model = wide_model(tmp_path / "model.pt", words=400, output_bias=True)
    small, report = tmp_path / "small.pt", tmp_path / "report.json"
    assert compress(model, "quantized", small, "--bits", 4, "--store", store, "--report", report).status == 0
    bias = torch.load(model, weights_only=True)["model"]["embedding.bias"]
    stored_bias = torch.load(small, weights_only=True)["model"]["embedding.bias"]
    assert torch.equal(stored_bias, bias if store == "fp32" else bias.half())
    tensors = torch.load(small, weights_only=True)["model"]
    weights = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("embedding."))
    assert abs(json.loads(report.read_text())["tables"][0]["stored_bytes"]["after"] - weights) <= 64


def test_packed_models_are_evaluated_and_trained(tmp_path: Path) -> None:
    data = small_corpus(tmp_path)
    sizes = {"embedding_dim": 24, "steps": 2}
    train(settings(data, tmp_path / "run", embedding={"method": "standard"}, **sizes))
    small, report = tmp_path / "small.pt", tmp_path / "report.json"
    asked = ["--rank", 12, "--store", "int8", "--report", report, "--verbose"]
    ended = compress(tmp_path / "run" / "last.pt", "projective", small, *asked)
    assert ended.status == 0 and "relative error in int8" in ended.out
    content = json.loads(report.read_text())["bytes_of_weights"]
    smaller = content["before"] / content["after"]
    assert f"{small}: weights of {content['after'] / 1000:.1f} kB instead of " in ended.out
    assert f"({smaller:.1f}x smaller)" in ended.out
    assert HEADER in torch.load(small, weights_only=True)["model"]
    embedding = load_model(small).model.embedding
    assert {type(parameter) for parameter in embedding.parameters()} == {PackedTensor}
    assert 0 < json.loads(report.read_text())["tables"][0]["storage"]["added_error"] < 0.05
    assert command("lm_evaluate", "-model", small, "-data", data).status == 0
    assert command("lm_generate", "-model", small, "-length", 3).status == 0
    packed = {"method": "projective", "rank": 12}
    train(settings(data, tmp_path / "on", init_from=str(small), embedding=packed, **sizes))
    written = torch.load(tmp_path / "on" / "last.pt", weights_only=True)["model"]
    assert HEADER not in written and written["embedding.codes"].dtype == torch.float32
    assert compress(small, "standard", tmp_path / "again.pt").status == 0
    torch.testing.assert_close(scores(tmp_path / "again.pt"), scores(small), atol=1e-4, rtol=0)


def define_model(path: Path) -> Path:
    """Like `wide_model`, but it ends in the width of the map of its unit."""
    return wide_model(path, NUM_WORDS, DIM, method="define", **DEFINE)


def test_only_the_map_is_replaced_by_codes(tmp_path: Path) -> None:
    model, small, report = define_model(tmp_path / "model.pt"), tmp_path / "small.pt", tmp_path / "report"
    codes = ["--num-codebooks", 4, "--codebook-size", 16, "--fit-steps", 20, "--seed", 5, "--store", "fp32"]
    assert compress(model, "compositional_code", small, *codes, "--report", report).status == 0
    old, new = load_model(model).model.embedding, load_model(small).model.embedding
    # The codes of the map equal those of a fit to its table, in both directions.
    options = {"num_codebooks": 4, "codebook_size": 16, "output_bias": True}
    wanted, _ = se.fit("compositional_code", old.inner_embedding().table(), seed=5, steps=20, **options)
    table = sum(wanted.codebooks[m][wanted.codes[:, m].long()] for m in range(4))
    torch.testing.assert_close(new.inner_embedding().table(), table)
    before, after = old.state_dict(), new.state_dict()
    rest = [name for name in before if not name.startswith("map.")]
    assert len(rest) >= 4 and all(torch.equal(after[name], before[name]) for name in rest)
    entry = new.entry(table)
    *_, expanded = new.expansion.outputs(entry)
    read = new.scale * torch.cat([entry, expanded], dim=1)
    torch.testing.assert_close(new.table(), new.reducer(read))
    bias = old.output_bias()
    assert bias is not None and torch.equal(new.output_bias(), bias)
    hidden = torch.randn(3, MAP, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(new.logits(hidden), hidden @ table.T + bias)
    # 4 codes of 4 bits for a word, and codebooks of 4 x 16 x 8 numbers; a bias for every word.
    (description,) = json.loads(report.read_text())["tables"]
    numbers = 4 * 16 * MAP + NUM_WORDS
    assert description["part"] == "map of define" and description["uses"] == ["input", "output"]
    assert description["parameters"] == {"before": NUM_WORDS * MAP + NUM_WORDS, "after": numbers}
    assert description["stored_bytes"]["after"] == 4 * numbers + NUM_WORDS * 4 * 4 // 8
    error = (old.inner_embedding().table() - table).norm() / old.inner_embedding().table().norm()
    assert description["fit"]["relative_error"] == pytest.approx(error.item(), rel=1e-4)


@pytest.mark.parametrize("store", ["fp32", "int8"])
def test_a_map_of_full_size_keeps_the_scores(tmp_path: Path, store: str) -> None:
    model, small = define_model(tmp_path / "model.pt"), tmp_path / "small.pt"
    assert compress(model, "projective", small, "--rank", MAP, "--store", store).status == 0
    tolerance = 1e-4 if store == "fp32" else 0.1
    torch.testing.assert_close(scores(small), scores(model), atol=tolerance, rtol=0)
    names = {name for name in torch.load(small, weights_only=True)["model"] if name.endswith(".scale")}
    # The layers after the map are not fitted, and stay in 32 bits.
    assert names == (set() if store == "fp32" else {"embedding.map.codes.scale"})


@pytest.mark.parametrize(
    ("kind", "method", "options", "printed"),
    [
        ("wide", "define", ["--map-dim", 4, "--expand-dim", 8, "--depth", 2], "takes 4 dimensions, but"),
        ("large", "standard", ["--store", "fp16"], "but fp16 is limited to 65504"),
        ("newer", "standard", [], "packed in version 2, but this program supports 1"),
    ],
)
def test_user_errors_are_one_line(
    tmp_path: Path, kind: str, method: str, options: list[object], printed: str
) -> None:
    path, small = tmp_path / "model.pt", tmp_path / "small.pt"
    model = wide_model(path)
    if kind == "large":
        alter(model, lambda content: content["model"]["embedding.weight"].mul_(1e6))
    elif kind == "newer":
        header = torch.tensor(list(b'{"version":2,"tensors":{}}'), dtype=torch.uint8)
        alter(model, lambda content: content["model"].update({HEADER: header}))
    assert compress(model, method, small, *options).says(printed) and not small.exists()


def log_probabilities(model: Path, lines: str) -> dict[str, torch.Tensor]:
    """The log-probabilities ``(T,)`` of each word of a model after each word of a text."""
    trained = load_model(model)
    index = {word: number for number, word in enumerate(trained.words)}
    ids = torch.tensor([[index[word] for word in lines.replace("\n", " <eos> ").split()]])
    with torch.no_grad():
        hidden = trained.model(ids, trained.model.initial_state(1)).hidden[0]
        scores = trained.model.embedding.log_prob(hidden)
    return {word: scores[:, number] for word, number in index.items()}


def assert_kept(model: Path, output: Path) -> None:
    """The remaining words share the whole probability as before."""
    before, after = log_probabilities(model, LINES), log_probabilities(output, LINES)
    assert len(after) < len(before)
    total = torch.stack([before[word] for word in after]).logsumexp(dim=0)
    for word in after:
        torch.testing.assert_close(after[word], before[word] - total, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["awd_lstm", "transformer_xl"])
@pytest.mark.parametrize("method", ["plain", "compressed first", "compressed after"])
def test_kept_words_keep_their_probabilities(tmp_path: Path, kind: str, method: str) -> None:
    model = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus", FEW), kind)
    text = tmp_path / "text"
    text.write_text(LINES)
    small, output = tmp_path / "small.pt", tmp_path / "out" / "trimmed.pt"
    if method == "compressed first":
        assert compress(model, "projective", small, "--rank", 4).status == 0
        model = small
    assert tool("trim", "--model", model, "--text", text, "--output", output).status == 0
    if method == "compressed after":
        assert compress(output, "projective", small, "--rank", 4).status == 0
        assert load_model(small).model.embedding.num_embeddings == 6
    assert set(load_model(output).words) == {"<unk>", "<eos>", "a", "c", "e", "i"}
    assert_kept(model, output)


def test_ids_report_and_evaluation(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "corpus", FEW)
    model, output = write_model(tmp_path / "model.pt", data), tmp_path / "trimmed.pt"
    text = tmp_path / "text"
    text.write_text(LINES)
    before = model.read_bytes()
    keep = tmp_path / "keep"
    keep.write_text("j\n")
    asked = ["--min-count", 2, "--keep", keep]
    ended = tool("trim", "--model", model, "--text", text, "--output", output, *asked)
    assert ended.status == 0 and model.read_bytes() == before
    words = load_corpus(data).vocabulary.words
    subset = [word for word in words if word in ("<unk>", "<eos>", "a", "c", "e", "j")]
    assert load_model(output).words == subset
    pairs = [line.split("\t") for line in (tmp_path / "trimmed.pt.ids.tsv").read_text().splitlines()]
    assert [(words[int(old)], int(new)) for old, new in pairs] == [(word, i) for i, word in enumerate(subset)]
    # Of the 11 tokens including three line ends, "i" was removed.
    assert "90.91% of 11 tokens kept (0 of them unknown, as before); 2 lines kept whole" in ended.out
    # One of the 11 tokens.
    assert "<unk>: 1 tokens (9.09%)" in command("lm_evaluate", "-model", output, "-data", text).out


def test_export_of_a_compressed_model(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model, small, output = (tmp_path / name for name in ("model.pt", "small.pt", "words.onnx"))
    wide_model(model)
    sizes = ["--codec", "uniform", "--bits", 4, "--group_size", 16]
    assert compress(model, "quantized", small, *sizes).status == 0
    asked = ["export", "--model", small, "--output", output, "--format", "onnx-embeddings"]
    printed = tool(*asked).out
    assert "4-bit blocks of 16 numbers" in printed and "tokens per second" in printed
    assert output.stat().st_size < small.stat().st_size

    embedding = load_model(small).model.embedding.eval()
    session = onnxruntime.InferenceSession(str(output), providers=["CPUExecutionProvider"])
    hidden = torch.randn(2, embedding.score_dim)
    inputs = {"ids": np.array([1, 7, 7]), "hidden": hidden.numpy()}
    vectors, scores = map(torch.from_numpy, session.run(["vectors", "scores"], inputs))
    with torch.no_grad():
        torch.testing.assert_close(vectors, embedding(torch.tensor([1, 7, 7])))
        torch.testing.assert_close(scores, embedding.logits(hidden), rtol=1e-4, atol=1e-4)

    assert tool(*asked).says("words.onnx")
    assert tool(*asked, "--force").status == 0
    assert tool("export", "--model", small, "--output", small, "--force").says("replace an input")


MODELS: dict[str, dict[str, Any]] = {
    "awd_lstm": {"hidden_dim": 24, "num_layers": 2},
    "transformer_xl": {
        "num_layers": 2,
        "num_heads": 2,
        "head_dim": 8,
        "feed_forward_dim": 32,
        "memory_length": 7,
        "same_length": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("embedding", [{"method": "standard"}, {"method": "adaptive", "cutoffs": [50, 150]}])
def test_whole_models(
    kind: str,
    embedding: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading a text in parts, with the state of the previous part, gives the scores of torch."""
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr("shared_embeddings.export.onnx._SECONDS", 0.0)
    path, output = tmp_path / "model.pt", tmp_path / "model.onnx"
    words = ["<unk>", "<eos>", *(f"w{number}" for number in range(298))]
    config = {"model": kind, "embedding_dim": 16, **MODELS[kind], "embedding": embedding}
    model = models.build(kind, words, embedding, {"embedding_dim": 16, **MODELS[kind]}).eval()
    state = pack(distinct_state(model), ["embedding"], "int8")
    save_state(path, state, words, config, None)
    assert "tokens per second" in tool("export", "--model", path, "--output", output).out

    model = load_model(path).model.eval()
    session = onnxruntime.InferenceSession(str(output), providers=["CPUExecutionProvider"])
    ids = torch.randint(len(words), (3, 15), generator=torch.Generator().manual_seed(4))
    ours, theirs = model.initial_state(3), [part.numpy() for part in model.initial_state(3)]
    for part in ids.split([1, 9, 5], dim=1):
        inputs = {f"state.{number}": values for number, values in enumerate(theirs)}
        logits, *theirs = session.run(None, {"ids": part.numpy(), **inputs})
        with torch.no_grad():
            hidden, ours, _ = model(part, ours)
            wanted = model.embedding.logits(hidden)
        torch.testing.assert_close(torch.from_numpy(logits), wanted, rtol=1e-3, atol=1e-4)
    for last, expected in zip(theirs, ours, strict=True):
        torch.testing.assert_close(torch.from_numpy(last), expected, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose table is wide enough for a few bits, and its validation text."""
    folder = tmp_path_factory.mktemp("choosing")
    data = write_corpus(folder / "corpus", " ".join(f"w{number}" for number in range(250)))
    changes = {"embedding": {"method": "standard"}, "embedding_dim": 32, "steps": 40}
    train(settings(data, folder / "run", **changes))
    return folder / "run/last.pt", folder / "corpus/valid.txt"


def choose(model: Path, *arguments: object) -> Ended:
    return tool("compress", "--model", model, *arguments)


def rows(text: str) -> list[tuple[str, float]]:
    """The method and the kept quality of every trial."""
    trials = text.partition("\n\n")[0]
    matches = re.findall(r"^\{method: (\w+).*?([\d.]+)%$", trials, flags=re.MULTILINE)
    return [(method, float(share)) for method, share in matches]


def test_candidates_are_ranked_by_divergence_or_else_by_share() -> None:
    def trial(share: float | None, kl: float | None) -> Trial:
        retention = Retention(share, "predictions", "how", needs_training=False, kl=kl)
        return Trial("standard", {}, "fp16", retention=retention)

    for better, worse in [
        (trial(0.90, 0.1), trial(0.95, 0.2)),
        (trial(0.95, None), trial(0.90, None)),
        (trial(0.0, 1.0), trial(None, None)),
    ]:
        assert better.rank < worse.rank


def test_the_original_is_measured_once(trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = trained
    quality, measured = TrainedLanguageModel.quality, []

    def counted(self: TrainedLanguageModel, validation: Validation) -> Quality:
        measured.append(self)
        return quality(self, validation)

    monkeypatch.setattr(TrainedLanguageModel, "quality", counted)
    ended = choose(model, "--bits", 8, "--compare", "--validation", text)
    assert ended.status == 0 and len(measured) == 1 + len(rows(ended.out))


def test_words_are_counted_once_for_all_candidates(
    trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = trained
    counts_of, counted = session.counts_of, []

    def count(words: Sequence[str], *arguments: Any) -> torch.Tensor:
        counted.append(len(words))
        return counts_of(words, *arguments)

    monkeypatch.setattr(session, "counts_of", count)
    ended = choose(model, "--bits", 8, "--compare", "--text", text)
    assert ended.status == 0 and len(rows(ended.out)) > 1 == len(counted)


@pytest.mark.slow
def test_the_smallest_model_within_a_loss(trained: tuple[Path, Path], tmp_path: Path) -> None:
    model, text = trained
    sizes = []
    for loss, least in (("0.1%", 99.9), ("0.2", 80.0)):
        small = tmp_path / f"{loss}.pt"
        ended = choose(model, "--max-loss", loss, "--validation", text, "--output", small)
        assert ended.status == 0 and rows(ended.out)[0][1] >= least
        sizes.append(load_model(small).model.embedding.counts()["stored_bits"])
    assert sizes[1] <= search.CLOSE_RATIO * sizes[0]


def test_few_sizes_are_tried_for_the_smallest(
    trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With models that lose in proportion to their ratio, and by a factor for each bit."""
    losses: dict[float, float] = {}
    opened = Session(CompressOptions(model=trained[0], compare=True, bits=4.0))
    for loss_at in (lambda ratio: ratio / 100, lambda ratio: min(9 * 16 ** (-32 / ratio), 1)):

        def losing(
            session: Session,
            method: str,
            candidate: Candidate,
            target: Target,
            in_full: bool,
            loss_at: Callable[[float], float] = loss_at,
        ) -> Trial:
            assert target.ratio is not None
            # One of several candidates loses less than the others.
            loss = min(1.0, loss_at(target.ratio) * (1 if candidate.options == {"codec": "spectral"} else 2))
            losses[target.ratio] = min(loss, losses.get(target.ratio, 1.0))
            retention = Retention(1 - loss, "predictions", "how", needs_training=False, kl=loss / 2)
            return Trial(method, candidate.options, candidate.store, retention=retention)

        monkeypatch.setattr(search, "attempt", losing)
        for loss in (0.03, 0.1, 0.5):
            for largest in (MaxLoss(loss, in_nats=False), MaxLoss(loss / 2, in_nats=True)):
                losses.clear()
                ratio = search.smallest_within(opened, largest).ratio
                assert ratio is not None and losses[ratio] <= loss and len(losses) <= 7
                is_last = any(ratio < tried <= search.CLOSE_RATIO * ratio for tried in losses)
                assert is_last or losses[ratio] >= 0.8 * loss
    failed = Trial("quantized", {}, "fp16", "needs more")
    monkeypatch.setattr(search, "attempt", lambda *_, **__: failed)
    with pytest.raises(ValueError, match="at all sizes that were tried; needs more"):
        search.smallest_within(opened, MaxLoss(0.01, in_nats=False))


def test_candidates_for_a_large_table_are_ranked_on_a_sample(
    trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = trained
    asked = ["--bits", 4, "--compare", "--text", text]
    whole = choose(model, *asked).out
    assert "on a sample of rows" not in whole
    too_small = ["--size", "24x", "--compare", "--text", text]
    refused = choose(model, *too_small).out.count("needs at least")
    monkeypatch.setattr(search, "SAMPLED_ROWS", 50)
    sampled = choose(model, *asked).out
    assert 1 <= len(rows(sampled)) < len(rows(whole)) and set(rows(sampled)) <= set(rows(whole))
    skipped = sampled.count("on a sample of rows, its error is")
    assert skipped == len(rows(whole)) - len(rows(sampled)) > 0
    assert choose(model, *too_small).out.count("needs at least") == refused > 0


@pytest.mark.parametrize("sample", [10**6, 50], ids=["whole", "sample"])
def test_a_candidate_that_fails_costs_its_row_only(
    trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: int
) -> None:
    fit, failing = QuantizedEmbedding.fit.__func__, {"spectral"}

    def partly(kind: type[QuantizedEmbedding], task: FitTask) -> Any:
        if task.options["codec"] in failing or "all" in failing:
            raise RuntimeError("these dtypes do not match\nsecond line")
        return fit(kind, task)

    def full(kind: type[QuantizedEmbedding], task: FitTask) -> Any:
        raise OSError(28, "No space left on device")

    asked = ["--size", "8x", "--output", tmp_path / "small.pt", "--force"]
    monkeypatch.setattr(QuantizedEmbedding, "fit", classmethod(partly))
    monkeypatch.setattr(search, "SAMPLED_ROWS", sample)
    ended = choose(trained[0], *asked)
    assert ended.status == 0 and len(rows(ended.out)) >= 1
    (failed,) = (line for line in ended.out.splitlines() if "RuntimeError: these dtypes do not match" in line)
    assert "codec: spectral" in failed
    failing.add("all")
    ended = choose(trained[0], "--size", "60x", "--compare")
    assert ended.status == 2 and ended.err.count("\n") == 1
    assert "no method is possible at this size" in ended.err
    monkeypatch.setattr(QuantizedEmbedding, "fit", classmethod(full))
    ended = choose(trained[0], *asked)
    assert ended.status == 2 and "No space left" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["small.pt"]


def test_a_target_leaves_other_options_to_the_user(trained: tuple[Path, Path], tmp_path: Path) -> None:
    options = ["--codec", "uniform", "--group-size", 16, "--size", "4x"]
    assert compress(trained[0], "quantized", tmp_path / "small.pt", *options).status == 0
    config = load_model(tmp_path / "small.pt").config["embedding"]
    assert (config["codec"], config["group_size"]) == ("uniform", 16)
