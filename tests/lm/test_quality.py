"""The quality of compressed language models: perplexity, agreement, and the choice of a method."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.adapter import CheckpointModel
from lm.checkpoint import load_model
from shared_embeddings.compress import session
from shared_embeddings.compress.measure import Comparison, Kept, Quality, Validation
from shared_embeddings.compress.sizing import Target
from shared_embeddings.fitting.task import FitTask
from shared_embeddings.modules.quantized import QuantizedEmbedding
from shared_embeddings.spec import Candidate
from tests.helpers import best_words
from tests.lm.runs import Ended, command, compress, settings, tool, write_corpus, write_model
from tests.lm.runs import run as train

pytestmark = pytest.mark.usefixtures("installed_host")


WORDS = " ".join(f"w{number}" for number in range(60))


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
    found = json.loads(report.read_text())["quality"]
    before, after = evaluated(model, text), evaluated(small, text)
    assert found["measure"] == "perplexity" and str(text) in found["how"]
    assert found["before"] == pytest.approx(before, rel=1e-6)
    assert found["after"] == pytest.approx(after, rel=1e-6)
    assert abs(before - after) > 0.001 * before
    (line,) = (line for line in ended.out.splitlines() if line.startswith("perplexity"))
    assert line.startswith(f"perplexity {after:.2f}, {before:.2f} before (")
    # Of a prepared corpus, the validation text.
    assert compress(model, "standard", small, "--validation", data, "--report", report, "--force").status == 0
    found = json.loads(report.read_text())["quality"]
    wanted = evaluated(model, data, "-split", "valid")
    assert found["before"] == found["after"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--validation none", "--validation: no such file"),
        ("--validation empty", "empty: is empty"),
        ("--validation short", "at least 2 are needed"),
        ("--validation latin", "not UTF-8 at byte 4"),
        ("--validation-source text --validation-target text", "this is a language model; give --validation"),
        ("--validation-target text", "without --validation-source"),
        (
            "--validation text --validation-source text --validation-target text",
            "give those that fit the model",
        ),
        ("--validation text --validation-subwords bpe", "translations only"),
        ("--validation-subwords bpe", "give those that fit the model"),
    ],
)
def test_user_errors_are_one_line_before_the_fit(
    arguments: str, message: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(*arguments: object, **options: object) -> None:
        raise AssertionError("a fit began")

    monkeypatch.setattr("shared_embeddings.compress.session.fit", fit)
    monkeypatch.chdir(tmp_path)
    files = {"text": b"a b c\n", "empty": b"", "short": b"\n", "latin": b"a b\n\xff c\n"}
    for name, content in files.items():
        Path(name).write_bytes(content)
    small = tmp_path / "small.pt"
    assert compress(model, "projective", small, "--rank", 2, *arguments.split()).says(message)
    assert not small.exists()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with random weights that are large enough to predict different words."""
    return write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus", WORDS))


def kept(model: Path, *arguments: object) -> tuple[str, dict[str, Any]]:
    """The last line, and its part of the report."""
    report = model.parent / "report.json"
    method, *options = arguments
    asked = [*options, "--report", report, "--force"]
    ended = compress(model, str(method), model.parent / "small.pt", *asked)
    return ended.out.splitlines()[-1], json.loads(report.read_text())["kept"]


@pytest.mark.parametrize("source", ["sampled", "text"])
def test_damaged_models_are_reported(model: Path, source: str) -> None:
    given = ["--text", model.parent / "corpus" / "test.txt"] if source == "text" else []
    line, found = kept(model, "projective", "--rank", 8, *given)
    assert line.startswith("kept 100% of the predictions of the original (") and not found["needs_training"]
    line, found = kept(model, "projective", "--rank", 1, *given)
    assert line.endswith("): train this model before using it")
    assert found["share"] < 0.5 and found["needs_training"]
    assert line.startswith(f"warning: kept {int(100 * found['share'])}% of the predictions")
    assert ("60 tokens of test.txt" if given else "1,000 tokens sampled from the model") in line


@torch.no_grad()
def test_agreement_compares_next_words_after_equal_words(model: Path, tmp_path: Path) -> None:
    """Of one line of 40 tokens, whose last one has no next word."""
    drawn = [f"w{number * 7 % 60}" for number in range(39)]
    (tmp_path / "line").write_text(" ".join(drawn) + "\n")
    _, found = kept(model, "projective", "--rank", 4, "--text", tmp_path / "line")
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
    assert 0.05 < found["share"] < 0.95
    assert found["share"] == pytest.approx(agreed / asked, abs=1e-4)


def test_validation_replaces_agreement(model: Path) -> None:
    text = model.parent / "corpus" / "test.txt"
    line, found = kept(model, "projective", "--rank", 1, "--validation", text)
    quality = json.loads((model.parent / "report.json").read_text())["quality"]
    assert found["share"] == pytest.approx(quality["before"] / quality["after"])
    assert f"{found['share']:.0%}" != "100%" and "% of the probability of a word of the original" in line


@pytest.mark.slow_except("awd_lstm")
@pytest.mark.parametrize("kind", ["awd_lstm", "transformer_xl"])
def test_generated_text_depends_on_the_seed(tmp_path: Path, kind: str) -> None:
    path = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus", WORDS), kind)
    opened = CheckpointModel(path)
    first, again, other = (best_words(opened.samples(None, seed, 1000)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len(first) == 1000 and len(first.unique()) > 5
    assert not opened.module.training


def test_diverged_models_have_no_quality(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "corpus", WORDS)
    opened = CheckpointModel(write_model(tmp_path / "model.pt", data))
    for parameter in opened.module.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    for texts in (None, [tmp_path / "corpus" / "test.txt"]):
        with pytest.raises(ValueError, match="not finite|no numbers|are NaN"):
            best_words(opened.samples(texts, 1, 1000))
            raise ValueError(Comparison(opened, None, texts, 1).result()[1].how)


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
    found = re.findall(r"^\{method: (\w+).*?([\d.]+)%$", trials, flags=re.MULTILINE)
    return [(method, float(kept)) for method, kept in found]


def test_the_best_candidate_is_written(trained: tuple[Path, Path], tmp_path: Path) -> None:
    model, text = trained
    small, report = tmp_path / "small.pt", tmp_path / "report.json"
    asked = ["--target-ratio", 4, "--validation", text, "--output", small, "--report", report]
    ended = choose(model, *asked)
    assert ended.status == 0
    found = rows(ended.out)
    assert len(found) >= 3 and {method for method, _ in found} == {"quantized", "projective"}
    assert found == sorted(found, key=lambda row: -row[1])
    written = json.loads(report.read_text())
    assert written["output"] == str(small) and f"{small}: weights of" in ended.out
    assert written["method"] == found[0][0] == load_model(small).model.embedding.method
    assert written["kept"]["share"] == pytest.approx(found[0][1] / 100, abs=1e-3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "small.pt"]
    assert choose(model, *asked).says("add --force")


def test_candidates_are_ranked_by_divergence_or_else_by_share() -> None:
    def trial(share: float | None, kl: float | None) -> session.Trial:
        kept = Kept(share, "predictions", "how", needs_training=False, kl=kl)
        return session.Trial("standard", {}, "fp16", kept=kept)

    for better, worse in [
        (trial(0.90, 0.1), trial(0.95, 0.2)),
        (trial(0.95, None), trial(0.90, None)),
        (trial(0.0, 1.0), trial(None, None)),
    ]:
        assert better.rank < worse.rank


def test_the_original_is_measured_once(trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = trained
    quality, measured = CheckpointModel.quality, []

    def counted(self: CheckpointModel, validation: Validation) -> Quality:
        measured.append(self)
        return quality(self, validation)

    monkeypatch.setattr(CheckpointModel, "quality", counted)
    ended = choose(model, "--bits", 8, "--compare", "--validation", text)
    assert ended.status == 0 and len(measured) == 1 + len(rows(ended.out))


def test_words_are_counted_once_for_all_candidates(
    trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = trained
    counts_of, counted = session.counts_of, []

    def count(words: Sequence[str], *given: Any) -> torch.Tensor:
        counted.append(len(words))
        return counts_of(words, *given)

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
    assert sizes[1] <= session.CLOSE * sizes[0]


def test_few_sizes_are_tried_for_the_smallest(
    trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With models that lose in proportion to their ratio, and by a factor for each bit."""
    losses: dict[float, float] = {}
    opened = session.Session(trained[0])
    for loss_at in (lambda ratio: ratio / 100, lambda ratio: min(9 * 16 ** (-32 / ratio), 1)):

        def losing(
            method: str, candidate: Candidate, target: Target, loss_at: Callable[[float], float] = loss_at
        ) -> session.Trial:
            assert target.ratio is not None
            # One of several candidates loses less than the others.
            loss = min(1.0, loss_at(target.ratio) * (1 if candidate.options == {"codec": "spectral"} else 2))
            losses[target.ratio] = min(loss, losses.get(target.ratio, 1.0))
            kept = Kept(1 - loss, "predictions", "how", needs_training=False, kl=loss / 2)
            return session.Trial(method, candidate.options, candidate.store, kept=kept)

        monkeypatch.setattr(opened, "attempt", losing)
        for loss in (0.03, 0.1, 0.5):
            for largest in (session.MaxLoss(loss), session.MaxLoss(loss / 2, in_nats=True)):
                losses.clear()
                ratio = opened.smallest_within(largest).ratio
                assert ratio is not None and 0.8 * loss <= losses[ratio] <= loss and len(losses) <= 5
    failed = session.Trial("quantized", {}, "fp16", "needs more")
    monkeypatch.setattr(opened, "attempt", lambda *_: failed)
    with pytest.raises(ValueError, match="at all sizes that were tried; needs more"):
        opened.smallest_within(session.MaxLoss(0.01))


def test_candidates_for_a_large_table_are_ranked_on_a_sample(
    trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = trained
    asked = ["--bits", 4, "--compare", "--text", text]
    whole = choose(model, *asked).out
    assert "on a sample of rows" not in whole
    too_small = ["--target-ratio", 24, "--compare", "--text", text]
    refused = choose(model, *too_small).out.count("needs at least")
    monkeypatch.setattr(session, "SAMPLED_ROWS", 50)
    sampled = choose(model, *asked).out
    tried = session.FITTED + 1  # the best without calibration, too
    assert len(rows(sampled)) == tried < len(rows(whole)) and set(rows(sampled)) <= set(rows(whole))
    assert sampled.count("on a sample of rows, its error is") == len(rows(whole)) - tried
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

    asked = ["--target-ratio", 8, "--output", tmp_path / "small.pt", "--force"]
    monkeypatch.setattr(QuantizedEmbedding, "fit", classmethod(partly))
    monkeypatch.setattr(session, "SAMPLED_ROWS", sample)
    ended = choose(trained[0], *asked)
    assert ended.status == 0 and len(rows(ended.out)) >= 2
    (failed,) = (line for line in ended.out.splitlines() if "RuntimeError: these dtypes do not match" in line)
    assert "codec: spectral" in failed
    failing.add("all")
    ended = choose(trained[0], "--target-ratio", 60, "--compare")
    assert ended.status == 2 and ended.err.count("\n") == 1
    assert "no method is possible at this size" in ended.err
    monkeypatch.setattr(QuantizedEmbedding, "fit", classmethod(full))
    ended = choose(trained[0], *asked)
    assert ended.status == 2 and "No space left" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["small.pt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give exactly one of --target-ratio, --target-bytes, --bits and --max-loss"),
        ("--bits 2 --target-ratio 4", "give exactly one of"),
        ("--bits 2 --compare", "give either --output or --compare"),
        ("--bits 2 --rank 4", "--rank is an option of a method"),
        ("--bits 64", "below 32"),
        ("--bits 2 --store int8", "--store needs --method"),
        ("--max-loss 120%", "write 1% or 0.01"),
        ("--max-loss=-1nats", "write 0.02nats, or a loss such as 1%"),
        ("--method quantized --max-loss 1%", "remove --method"),
        ("--method quantized --bits 2 --target-ratio 9", "'bits' is chosen by the target"),
        ("--target-ratio 1000000", "no method is possible at this size"),
    ],
)
def test_options_that_contradict_each_other(
    trained: tuple[Path, Path], tmp_path: Path, arguments: str, message: str
) -> None:
    ended = choose(trained[0], "--output", tmp_path / "small.pt", *arguments.split())
    assert ended.status == 2 and message in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_has_no_output(trained: tuple[Path, Path]) -> None:
    assert choose(trained[0], "--bits", 2).says("give either --output or --compare")
    assert choose(trained[0], "--bits", 2, "--compare", "--force").says(
        "--force has no effect with --compare"
    )


def test_a_target_leaves_other_options_to_the_user(trained: tuple[Path, Path], tmp_path: Path) -> None:
    options = ["--codec", "uniform", "--group-size", 16, "--target-ratio", 4]
    assert compress(trained[0], "quantized", tmp_path / "small.pt", *options).status == 0
    config = load_model(tmp_path / "small.pt").config["embedding"]
    assert (config["codec"], config["group_size"]) == ("uniform", 16)
