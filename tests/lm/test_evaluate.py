"""Evaluation and generation, their commands, and the cache pointer."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lm import evaluation
from lm.checkpoint import load_model
from lm.data.corpus import load_corpus
from lm.evaluation import (
    CachePointer,
    PointerOptions,
    Reading,
    Score,
    evaluate,
    evaluate_with_pointer,
    perplexity,
)
from lm.generation import Sampling, choose, generate, write
from shared_embeddings.utils.errors import UserError
from tests.helpers import alter
from tests.lm.runs import TinyLSTM, command, text, write_corpus, write_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, ``corpus/data``, and a model of its words, ``model.pt``."""
    folder = tmp_path_factory.mktemp("home")
    write_model(folder / "model.pt", write_corpus(folder / "corpus"))
    return folder


def results(home: Path, *arguments: object, data: Path | None = None) -> tuple[dict[str, Any], str]:
    """The record of ``lm_evaluate``, and what it prints."""
    path = home / "results.json"
    where = data or home / "corpus" / "data"
    ended = command(
        "lm_evaluate", "-model", home / "model.pt", "-data", where, "-output", path, "-force", *arguments
    )
    assert ended.status == 0, ended.err
    return json.loads(path.read_text()), ended.out


def metrics(home: Path, *arguments: object, data: Path | None = None) -> dict[str, Any]:
    return dict(results(home, *arguments, data=data)[0]["metrics"])


@pytest.mark.parametrize(
    ("reading", "passes"), [((7,), 9), ((59,), 1), ((70, 3, 20, 2), 2), ((10, 5, 20, 2), 3 + 3)]
)
def test_results(home: Path, reading: tuple[int, ...], passes: int) -> None:
    """59 targets: in segments of 7, all at once, and in two batches of chunks of 20 targets or fewer."""
    options = {f"-{name}": value for name, value in zip(Reading._fields, reading)}
    record, printed = results(home, *(part for pair in options.items() for part in pair))
    model = load_model(home / "model.pt").model
    corpus = load_corpus(home / "corpus" / "data")
    score = evaluate(model, corpus.test, Reading(*reading), progress=False)
    measured = record["metrics"]
    assert measured["perplexity"] == pytest.approx(score.perplexity)
    assert measured["tokens"] == score.tokens == 59
    assert all(measured[name[1:]] == value for name, value in options.items())
    assert measured["inference_ms"] == pytest.approx(59_000 / measured["tokens_per_second"] / passes)
    assert record["split"] == "test"
    assert record["data_checksum"] == corpus.description["checksum"]
    assert record["counts"]["total"] == sum(p.numel() for p in model.parameters())
    assert record["config"]["hidden_dim"] == 12
    assert record["peak_memory_mib"] > 1 and record["device"].startswith("cpu")
    assert record["versions"]["torch"] and record["date"]
    assert f"perplexity {score.perplexity:.2f}" in printed and "59 targets" in printed


def test_another_split_and_raw_text_have_the_same_tokens(home: Path) -> None:
    split, _ = results(home, "-split", "valid")
    raw, _ = results(home, data=home / "corpus" / "valid.txt")
    assert raw["metrics"]["nats"] == pytest.approx(split["metrics"]["nats"])
    assert split["metrics"]["nats"] != pytest.approx(metrics(home)["nats"])
    assert raw["data_checksum"] != split["data_checksum"]


def test_unknown_words_are_counted(home: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a b nowhere\nc <unk> seen d\n")
    record, printed = results(home, data=tmp_path / "text")
    assert record["metrics"]["unknown"] == 3 and "<unk>: 3 tokens" in printed


def test_pointer(home: Path) -> None:
    settings = {"window": 9, "theta": 0.5, "lambda": 0.2}
    measured = metrics(home, "-pointer", json.dumps(settings), "-target_length", 5)
    model, tokens = load_model(home / "model.pt").model, load_corpus(home / "corpus" / "data").test
    plain, mixed = evaluate_with_pointer(model, tokens, PointerOptions(9, 0.5, 0.2), Reading(5), False)
    assert measured["perplexity"] == pytest.approx(plain.perplexity)
    assert measured["pointer_perplexity"] == pytest.approx(mixed.perplexity)
    assert measured["pointer"] == settings


def test_per_word(home: Path, tmp_path: Path) -> None:
    (tmp_path / "reference").write_text("one two\nthree\n")
    for words, arguments in ((30, ["-words", 30]), (5, ["-reference", tmp_path / "reference"])):
        measured = metrics(home, *arguments)
        assert measured["words"] == words
        assert measured["word_perplexity"] == pytest.approx(math.exp(measured["nats"] / words))


def test_memory_of_a_transformer(tmp_path: Path) -> None:
    write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus"), "transformer_xl")
    short = ("-target_length", 4)
    trained = metrics(tmp_path, *short)
    longer = metrics(tmp_path, *short, "-memory_length", 20, "-clamp_length", 9, "-same_length")
    assert trained["memory_length"] == 6 and not trained["same_length"]
    assert (longer["memory_length"], longer["clamp_length"], longer["same_length"]) == (20, 9, True)
    assert longer["nats"] != pytest.approx(trained["nats"], rel=1e-6)
    alone, batches = (metrics(tmp_path, *short, "-chunk_length", 17, "-batch_size", size) for size in (1, 3))
    assert batches["nats"] == pytest.approx(alone["nats"], rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-target_length", 0], "argument -target_length"),
        (["-context_length", -1], "context_length is -1"),
        (["-context_length", 5], "context_length is 5, which has no effect on a single chunk"),
        (["-memory_length", 3], "has no memory_length"),
        (["-pointer", "{window: 3}"], "pointer: option 'theta' is missing"),
        (["-words", 3, "-reference", __file__], "-reference: not allowed with argument -words"),
        (["-data", __file__, "-split", "test"], "remove -split"),
    ],
)
def test_invalid_settings(home: Path, arguments: list[object], message: str) -> None:
    data = [] if "-data" in arguments else ["-data", home / "corpus" / "data"]
    assert command("lm_evaluate", "-model", home / "model.pt", *data, *arguments).says(message)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 tokens"),
        (".", "lm_prepare"),
        ("a b c d e f h", "is not the model's"),
        ("a b c d e f g h", "10 words"),
    ],
)
def test_invalid_data(data: bytes | str, message: str, home: Path, tmp_path: Path) -> None:
    """Texts, folders, and corpora of other words."""
    path = tmp_path / "text"
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        path = write_corpus(tmp_path / "other", data) if " " in data else tmp_path / data
    assert command("lm_evaluate", "-model", home / "model.pt", "-data", path).says(message)


def test_diverged_models_fail(home: Path, tmp_path: Path) -> None:
    # A finite model whose scores overflow.
    large = tmp_path / "large.pt"
    alter(home / "model.pt", lambda content: [t.fill_(3e38) for t in content["model"].values()], large)
    output, data = tmp_path / "results.json", home / "corpus" / "data"
    assert command("lm_evaluate", "-model", large, "-data", data, "-output", output).says("diverged")
    assert not output.exists()


def tokens(length: int) -> np.ndarray:
    return text(length).numpy().astype(np.int32)


@torch.no_grad()
def nats_of_one_target(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """The loss of the last id, predicted from the others in one pass."""
    output = model(ids[None, :-1], model.initial_state(1))
    scores = output.hidden[0, -1] @ model.embedding.output_table().T
    return float(F.cross_entropy(scores.double(), ids[-1]))


def brute_force(model: torch.nn.Module, ids: torch.Tensor, context: int, chunk: int) -> float:
    """Every target separately, starting with the context of its chunk."""
    total = 0.0
    for target in range(1, len(ids)):
        chunk_begin = (target - 1) // chunk * chunk
        total += nats_of_one_target(model, ids[max(0, chunk_begin - context) : target + 1])
    return total


@pytest.mark.slow_except("0-7")
@pytest.mark.parametrize(("context", "chunk"), [(0, None), (0, 7), (5, 7), (9, 4), (40, 1), (3, 31), (3, 32)])
def test_every_target_is_scored_once_with_its_context(context: int, chunk: int | None) -> None:
    model = TinyLSTM()
    expected = brute_force(model, text(33), context, chunk or 32)
    for target_length, batch_size in itertools.product([1, 4, 70], [1, 3, 50]):
        reading = Reading(target_length, context, chunk, batch_size)
        score = evaluate(model, tokens(33), reading, progress=False)
        assert score.tokens == 32
        assert score.nats == pytest.approx(expected, rel=1e-5), (target_length, batch_size)


@pytest.mark.parametrize("method", ["adaptive", "projective"])
def test_other_softmaxes(method: str) -> None:
    options: dict[str, Any] = {"adaptive": {"cutoffs": [4], "factor": 2}, "projective": {"rank": 3}}[method]
    model = TinyLSTM(method=method, **options)
    ids = text(20)
    with torch.no_grad():
        log_probs = model.embedding.log_prob(model(ids[None, :-1], model.initial_state(1)).hidden[0])
    expected = -log_probs.gather(1, ids[1:, None]).sum().item()
    assert evaluate(model, ids.numpy(), Reading(6), progress=False).nats == pytest.approx(expected, rel=1e-5)


def test_perplexity_by_hand() -> None:
    score = Score(nats=6 * math.log(2.0), tokens=3)
    assert score.perplexity == pytest.approx(4.0)
    assert perplexity(score.nats / 2) == pytest.approx(8.0)
    assert Score(1e9, 1).perplexity == math.inf


@pytest.mark.parametrize("mode", [True, False])
def test_the_mode_of_the_model_is_restored(mode: bool) -> None:
    model = TinyLSTM().train(mode)
    evaluate(model, tokens(5), progress=False)
    assert model.training is mode


@torch.no_grad()
def pointer_by_loops(
    model: TinyLSTM, ids: torch.Tensor, options: PointerOptions, scored_from: int = 1
) -> float:
    """The mixture written out: a probability for every word of the vocabulary, position by position."""
    hidden = model(ids[None, :-1], model.initial_state(1)).hidden[0].double()
    model_probs = (hidden @ model.embedding.output_table().double().T).softmax(dim=-1)
    nats = 0.0
    for now in range(len(ids) - 1):
        cache = [0.0] * model.embedding.num_embeddings
        places = range(max(0, now - options.window), now)
        for place in places:
            cache[ids[place + 1]] += math.exp(options.theta * float(hidden[now] @ hidden[place]))
        probability = float(model_probs[now, ids[now + 1]])
        if len(places):
            share = cache[ids[now + 1]] / sum(cache)
            probability = (1 - options.weight) * probability + options.weight * share
        if now + 1 >= scored_from:
            nats -= math.log(probability)
    return nats


@pytest.mark.slow_except("0.7-0.13-*", "3.0-0.9-5-7")
@pytest.mark.parametrize("target_length", [1, 7, 100])
@pytest.mark.parametrize("window", [1, 5, 200])
@pytest.mark.parametrize(("theta", "weight"), [(0.7, 0.13), (0.0, 0.5), (3.0, 0.9)])
def test_equals_a_plain_loop(theta: float, weight: float, window: int, target_length: int) -> None:
    model, ids, options = TinyLSTM(), text(45), PointerOptions(window, theta, weight)
    plain, mixed = evaluate_with_pointer(model, ids.numpy(), options, Reading(target_length), progress=False)
    assert mixed.tokens == plain.tokens == 44
    assert mixed.nats == pytest.approx(pointer_by_loops(model, ids, options), rel=1e-5)
    assert plain.nats == pytest.approx(evaluate(model, ids.numpy(), progress=False).nats, rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_each_chunk_has_its_own_cache_filled_by_its_context(batch_size: int) -> None:
    model, ids, options = TinyLSTM(), text(41), PointerOptions(9, 0.5, 0.3)
    reading = Reading(4, context_length=6, chunk_length=10, batch_size=batch_size)
    expected = 0.0
    for begin in range(0, 40, 10):
        context = min(6, begin)
        expected += pointer_by_loops(
            model, ids[begin - context : begin + 11], options, scored_from=context + 1
        )
    _, mixed = evaluate_with_pointer(model, ids.numpy(), options, reading, progress=False)
    assert mixed.nats == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("queries", "scores"), [(3, 2**24), (256, 1)])
def test_block_size_does_not_affect_the_result(
    queries: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, options = TinyLSTM(), text(60), PointerOptions(7, 0.5, 0.3)
    whole = evaluate_with_pointer(model, ids.numpy(), options, progress=False)[1]
    monkeypatch.setattr(evaluation, "_QUERIES", queries)
    monkeypatch.setattr(evaluation, "_SCORES", scores)
    in_blocks = evaluate_with_pointer(model, ids.numpy(), options, progress=False)[1]
    assert in_blocks.nats == pytest.approx(whole.nats)


def test_by_hand() -> None:
    # Two positions in the cache: scores 0 and ln 3; the second was followed by the current target.
    cache = CachePointer(PointerOptions(window=2, theta=1.0, weight=0.25))
    hidden = torch.tensor([[[0.0, 1.0], [math.log(3.0), 0.0], [1.0, 0.0]]])
    log_probs, has_cache = cache.log_probabilities(hidden, torch.tensor([[5, 6, 6]]))
    assert log_probs[0].tolist() == pytest.approx([-math.inf, -math.inf, math.log(0.75)])
    assert has_cache.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "window.* 0"),
        ({"theta": -1}, "theta.* -1"),
        ({"lambda": 1}, "lambda is 1"),
    ],
)
def test_invalid_pointer_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"pointer: .*{message}"):
        PointerOptions.parse({"window": 5, "theta": 1.0, "lambda": 0.1, **changes})


@pytest.fixture
def model(home: Path) -> Path:
    return home / "model.pt"


def written(model: Path, *arguments: object) -> str:
    ended = command("lm_generate", "-model", model, *arguments)
    assert ended.status == 0, ended.err
    return ended.out


def words(text: str) -> list[str]:
    return text.replace("\n", " <eos> ").split()


def test_a_seed_gives_the_same_text(model: Path) -> None:
    first = written(model, "-seed", 5)
    assert written(model, "-seed", 5) == first != written(model, "-seed", 6)
    assert 100 <= len(words(first)) <= 101
    assert set(words(first)) <= {*"abcdefg", "<eos>"}
    assert first.endswith("\n") and "<eos>" not in first


def test_generation_continues_the_prompt(model: Path) -> None:
    text, longer = (
        written(model, "-prompt", "a b\nc", "-length", length, "-temperature", 0) for length in (3, 9)
    )
    assert text.startswith("a b\nc") and longer.startswith(text.rstrip("\n"))
    assert len(words(text)) - words(text).count("<eos>") <= 6


def test_transformer_with_a_memory_shorter_than_the_text(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.pt", write_corpus(tmp_path / "corpus"), "transformer_xl")
    prompt = "a b c d e f g a b c"
    text = written(path, "-prompt", prompt, "-length", 20)
    assert text.startswith(prompt) and 30 <= len(words(text)) <= 31


def test_several_samples(model: Path) -> None:
    parts = written(model, "-samples", 3, "-length", 40, "-seed", 5).split("---\n")
    assert len(set(parts)) == 3
    assert parts[1] == written(model, "-length", 40, "-seed", 6)


def test_unknown_words_of_a_prompt(model: Path) -> None:
    ended = command("lm_generate", "-model", model, "-prompt", "a zebra b zebra", "-length", 2)
    assert ended.status == 0 and ended.out.startswith("a zebra b zebra")
    assert ended.err == "lm_generate: unknown words are read as <unk>: zebra\n"


def test_unk_is_generated_only_if_allowed(model: Path) -> None:
    assert "<unk>" not in written(model, "-length", 400, "-temperature", 3)
    assert "<unk>" in written(model, "-length", 400, "-temperature", 3, "-allow_unknown")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (([], ["a", "b", "<eos>", "c"]), "a b\nc\n"),
        ((["a"], ["<eos>", "<eos>", "b", "<eos>"]), "a\n\nb\n"),
        ((["a", "<eos>"], ["b"]), "a\nb\n"),
    ],
)
def test_lines(parts: tuple[list[str], list[str]], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(*parts)
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-length", 0, "-prompt", "a b"], "argument -length"),
        (["-temperature", -1], "temperature is -1"),
        (["-top_k", 3, "-temperature", 0], "top_k has no effect"),
        (["-samples", 2, "-temperature", 0], "samples has no effect"),
    ],
)
def test_invalid_settings_of_generation(model: Path, arguments: list[object], message: str) -> None:
    assert command("lm_generate", "-model", model, *arguments).says(message)


def sampled(model: torch.nn.Module, prompt: list[int], length: int = 30, **how: Any) -> list[int]:
    return list(generate(model, prompt, length, Sampling(**how), seed=1))


def test_greedy_takes_the_best_word_given_the_whole_prefix() -> None:
    model = TinyLSTM()
    ids = [3, 1, 4]
    for _ in range(12):
        with torch.no_grad():
            hidden = model(torch.tensor([ids]), model.initial_state(1)).hidden[0, -1]
            ids.append(int((hidden @ model.embedding.output_table().T).argmax()))
    assert sampled(model, ids[:3], 12, temperature=0.0) == ids[3:]
    # The same after a longer prefix in one pass.
    assert sampled(model, ids[:9], 6, temperature=0.0) == ids[9:]


def test_models_that_cannot_generate() -> None:
    model = TinyLSTM()
    before = torch.get_rng_state()
    with pytest.raises(UserError, match="no word can be generated"):
        sampled(model, [0], forbidden=tuple(range(11)))
    torch.nn.init.constant_(model.lstm.weight_hh_l0, math.nan)
    with pytest.raises(UserError, match="not finite"):
        sampled(model, [0, 1])
    assert torch.equal(torch.get_rng_state(), before)


LOG_PROBS = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()


def frequencies(number: int = 2000, **how: Any) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.tensor([choose(LOG_PROBS, Sampling(**how), generator) for _ in range(number)])
    return (drawn.bincount(minlength=4) / number).tolist()


@pytest.mark.slow_except("how6-expected6")
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 9}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, [p * p / 0.345 for p in (0.5, 0.25, 0.15, 0.1)]),
        ({"temperature": 1e-9}, [1, 0, 0, 0]),
        ({"temperature": 1e-300}, [1, 0, 0, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"forbidden": (0,)}, [0, 0.5, 0.3, 0.2]),
        ({"forbidden": (0,), "top_k": 1}, [0, 1, 0, 0]),
        ({"forbidden": (0, 1), "temperature": 0.0}, [0, 0, 1, 0]),
    ],
)
def test_sampling_frequencies(how: dict[str, Any], expected: list[float]) -> None:
    measured = frequencies(**how)
    assert measured == pytest.approx(expected, abs=0.04)
    assert [frequency > 0 for frequency in measured] == [share > 0 for share in expected]
