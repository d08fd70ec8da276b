"""Beam search and sampling, other options of ``onmt_translate``, and copy attention."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onmt.modules.copy_generator import CopyGenerator
from onmt.translate.penalties import PenaltyBuilder
from onmt.utils.loss import LossCompute
from torch import Tensor

import shared_embeddings as se
from nmt.checkpoints import read_checkpoint, read_weights
from nmt.embeddings import shared_embeddings_of, words_module
from nmt.fixes.copying import collapsed, copies_of, over_words
from nmt.hooks import apply_patches
from nmt.models import build_from_checkpoint, describe_checkpoint
from nmt.server import Models, SourceText
from nmt.vocabulary import Vocab
from tests.nmt.conftest import FUNNEL, WORDS, Capture, Host, Trained, built, run
from tests.nmt.test_adapter import SOURCE, TARGET, UNTIED, compress, trim
from tests.nmt.test_training import METHODS

pytestmark = pytest.mark.usefixtures("installed_host")

Learned = Callable[[str], tuple[Host, Path]]
RNN = {"encoder_type": "brnn", "decoder_type": "rnn", "position_encoding": False}
KINDS: dict[str, dict[str, Any]] = {"transformer": {}, "rnn": RNN}
COPYING: dict[str, dict[str, Any]] = {
    "copying transformer": {},
    "copying rnn": RNN,
    "coverage": {**RNN, "coverage_attn": True, "lambda_coverage": 0.5},
    "one attention": {**RNN, "reuse_copy_attn": True},
}
# Sampling from the best word only; a beam of one is another search.
GREEDY = "-beam_size 1 -random_sampling_topk 1"
SEARCHES = [
    "-beam_size 3 -n_best 2",
    "-beam_size 1",
    "-beam_size 3 -replace_unk",
    "-beam_size 3 -block_ngram_repeat 2",
    "-beam_size 3 -block_ngram_repeat 1 -n_best 2",
    "-beam_size 1 -block_ngram_repeat 1",
    f"{GREEDY} -min_length 4",
    f"{GREEDY} -min_length 2 -block_ngram_repeat 1",
    f"{GREEDY} -block_ngram_repeat 2",
    "-beam_size 3 -ratio 1.2",
    "-beam_size 3 -coverage_penalty wu -beta 0.1",
    "-beam_size 3 -coverage_penalty wu -beta 0.1 -stepwise_penalty",
    "-beam_size 3 -coverage_penalty summary -beta 0.5",
    "-beam_size 3 -length_penalty wu -alpha 0.5",
    "-beam_size 3 -min_length 4",
]


FEW = 12


@pytest.fixture(autouse=True)
def patches() -> None:
    """OpenNMT-py as the commands see it."""
    apply_patches()


@pytest.fixture
def some_words(host: Host) -> Host:
    """A corpus to copy, with most words outside the vocabulary."""
    for split in ("train", "valid", "test"):
        host.write(f"{split}.tgt", (host.folder / f"{split}.src").read_text().splitlines())
    host.write("vocab", [f"{word}\t9" for word in list(WORDS)[:FEW]])
    return host


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """Models whose translations differ in length and words; those of `COPYING` have started to copy."""
    models: dict[str, tuple[Host, Path]] = {}

    def get(kind: str) -> tuple[Host, Path]:
        if kind not in models:
            host = Host(tmp_path_factory.mktemp("search"))
            if kind in COPYING:
                some_words.__wrapped__(host)  # type: ignore[attr-defined]
                settings = {**COPYING[kind], **UNTIED, "copy_attn": True}
            else:
                settings = host.language_model() if kind == "language model" else KINDS[kind]
                settings = {"embedding": FUNNEL, **settings}
            models[kind] = host, host.train("model", **settings, train_steps=60, save_checkpoint_steps=60)
        return models[kind]

    return get


@pytest.mark.slow_except("rnn--beam_size 3 -replace_unk")
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_batched_search_equals_single_sentences(kind: str, search: str, learned: Learned) -> None:
    host, model = learned(kind)
    one_by_one = host.translate(model, *search.split(), "-batch_size", "1")
    together = host.translate(model, *search.split(), "-batch_size", "7")
    assert together == one_by_one
    assert len(set(one_by_one)) > 2


@pytest.mark.slow_except("-beam_size 1 -random_sampling_topk 1-1")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("search", ["-beam_size 3", GREEDY])
def test_block_ngram_repeat(search: str, size: int, learned: Learned) -> None:
    host, model = learned("transformer")
    asked = [*search.split(), "-min_length", "6", "-batch_size", "7"]
    free = host.translate(model, *asked)
    assert any(_repeats(line, size) for line in free)
    lines = host.translate(model, *asked, "-block_ngram_repeat", size)
    assert not any(_repeats(line, size) for line in lines)


def _repeats(line: str, size: int) -> bool:
    """Whether a line has the same `size` words in a row twice."""
    words = line.split()
    runs = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    return len(set(runs)) < len(runs)


def test_padding_needs_no_coverage() -> None:
    penalty = PenaltyBuilder("wu", "none").coverage_penalty
    coverage = torch.tensor([[0.5, 0.25, 2.0, 0.0]])
    # -(log 0.5 + log 0.25 + log 1); a position without attention counts nothing.
    assert float(penalty(coverage, 0.5)) == pytest.approx(0.5 * torch.log(torch.tensor(8.0)).item())


def test_alignments(host: Host) -> None:
    model = host.train("model", embedding=FUNNEL, alignment_heads=1, alignment_layer=0)
    for line in host.translate(model, "-report_align"):
        words, _, pairs = line.partition(" ||| ")
        assert len(pairs.split()) == len(words.split()) and all("-" in pair for pair in pairs.split())


SAMPLED = ("-min_length", "4", "-random_sampling_topk", "-1")


def test_zero_temperature_is_greedy(trained: Trained) -> None:
    host, checkpoint = trained(train_steps=1)
    best = host.translate(checkpoint, "-min_length", "4", "-beam_size", "1")
    for seed in ("1", "2"):
        assert host.translate(checkpoint, *SAMPLED, "-random_sampling_temp", "0", "-seed", seed) == best


def test_a_seed_makes_sampling_repeatable(trained: Trained) -> None:
    host, checkpoint = trained(train_steps=1)

    def drawn(seed: str) -> list[str]:
        return host.translate(checkpoint, *SAMPLED, "-seed", seed)

    assert drawn("3") == drawn("3") != drawn("4")
    assert drawn("-1") != drawn("-1")


# Copy attention


def test_each_sentence_copies_from_its_own_source() -> None:
    """The rows of three sentences equal those of each sentence alone."""
    generator = CopyGenerator(6, 9, 1)
    hidden, attention = torch.randn(3, 4, 6), torch.rand(3, 4, 5).softmax(dim=2)
    source = torch.nn.functional.one_hot(torch.randint(0, 7, (3, 5)), 7).float()
    together = generator(hidden.flatten(0, 1), attention.flatten(0, 1), source).view(3, 4, 16)
    for sentence in range(3):
        alone = generator(hidden[sentence], attention[sentence], source[sentence : sentence + 1])
        torch.testing.assert_close(together[sentence], alone)
        copying = torch.sigmoid(generator.linear_copy(hidden[sentence]))
        torch.testing.assert_close(alone[:, 9:], copying * (attention[sentence] @ source[sentence]))
    torch.testing.assert_close(together.sum(dim=2), torch.ones(3, 4))


def test_copies_of_known_words_count_as_the_words() -> None:
    vocabulary = Vocab(["<unk>", "<blank>", "a", "b"])
    sources = [Vocab(["<unk>", "a", "x"]), Vocab(["<unk>", "b", "a"])]
    probs = torch.tensor([[[0.1, 0.0, 0.2, 0.1, 0.0, 0.4, 0.2]], [[0.1, 0.0, 0.2, 0.1, 0.0, 0.4, 0.2]]])
    copies = [copies_of(words, vocabulary, probs.device) for words in sources]
    assert collapsed(probs, copies) is probs
    wanted = [[[0.1, 0.0, 0.6, 0.1, 0.0, 0.0, 0.2]], [[0.1, 0.0, 0.4, 0.5, 0.0, 0.0, 0.0]]]
    torch.testing.assert_close(probs, torch.tensor(wanted), atol=1e-9, rtol=0)


def test_coverage_is_the_sum_of_earlier_attention() -> None:
    attention = torch.tensor([[[0.7, 0.3], [0.4, 0.6], [0.5, 0.5]]])
    # Half of 0 for the first word and of min(0.4, 0.7) + min(0.6, 0.3) for the second; the third is padding.
    asked = SimpleNamespace(padding_idx=1, lambda_coverage=0.5)
    targets = torch.tensor([7, 8, 1])
    weighed = LossCompute._compute_coverage_loss(asked, attention, attention.cumsum(dim=1), targets)
    assert float(weighed) == pytest.approx(0.35)


def test_attention_without_padding_is_the_softmax_of_the_words() -> None:
    scores = torch.randn(2, 3, 4)
    attention = over_words(scores.softmax(dim=2), torch.tensor([4, 2]))
    torch.testing.assert_close(attention[0], scores[0].softmax(dim=1))
    torch.testing.assert_close(attention[1, :, :2], scores[1, :, :2].softmax(dim=1))
    assert torch.equal(attention[1, :, 2:], torch.zeros(3, 2))


@pytest.mark.slow_except("copying transformer")
@pytest.mark.parametrize("kind", COPYING)
def test_step_is_the_sum_of_its_sentences(kind: str, some_words: Host) -> None:
    """One batch of the whole corpus and single sentences have the same gradient."""
    # Upstream drops duplicate lines of a bucket.
    lines = sorted(set((some_words.folder / "train.src").read_text().splitlines()))
    sentences = len(lines)
    for side in ("src", "tgt"):
        some_words.write(f"train.{side}", lines)
    options = {**COPYING[kind], **UNTIED, "copy_attn": True, "dropout": [0.0], "normalization": "tokens"}
    options |= {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "train_steps": 1}
    options |= {"bucket_size": sentences, "save_checkpoint_steps": 1}
    whole = some_words.train("whole", **options, batch_size=sentences)
    single = some_words.train("single", **options, batch_size=1, accum_count=[sentences])
    start = some_words.train("start", **{**options, "learning_rate": 0.0}, batch_size=sentences)
    moved = 0.0
    for part, other, before in zip(*(read_weights(str(path))[1:] for path in (whole, single, start))):
        for name, tensor in part.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=2e-6, msg=name)
            moved += float((tensor - before[name]).abs().sum())
    assert moved > 0.1


@pytest.mark.slow_except("copying rnn--beam_size 1")
@pytest.mark.parametrize(
    "search", ["-beam_size 3 -n_best 2", "-beam_size 1", "-beam_size 1 -random_sampling_topk 1"]
)
@pytest.mark.parametrize("kind", COPYING)
def test_batch_equals_single_sentences(kind: str, search: str, learned: Learned) -> None:
    host, model = learned(kind)
    asked = [*search.split(), "-with_score"]
    one_by_one = host.translate(model, *asked, "-batch_size", "1")
    together = host.translate(model, *asked, "-batch_size", "7")
    assert len(set(one_by_one)) > 3
    for line, other in zip(together, one_by_one, strict=True):
        words, score = line.rsplit("\t", 1)
        wanted, wanted_score = other.rsplit("\t", 1)
        assert words == wanted
        assert float(score) == pytest.approx(float(wanted_score), abs=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_perplexities_of_targets_are_per_token(kind: str, learned: Learned, capfd: Capture) -> None:
    host, model = learned(kind)
    translated = host.translate(
        model, "-tgt", host.folder / "test.tgt", "-length_penalty", "none", "-with_score"
    )
    printed = dict(re.findall(r"(GOLD|PRED) SCORE: \S+ \1 PPL: (\S+)", capfd.readouterr().err))
    network, vocabs, *_ = build_from_checkpoint(str(model))
    texts = [(host.folder / f"test.{side}").read_text().splitlines() for side in ("src", "tgt")]
    total, tokens = 0.0, 0
    for source, target in zip(*texts, strict=True):
        words = vocabs["tgt"]([*target.split(), "</s>"])
        read = torch.tensor(vocabs["src"](source.split()))[None, :, None]
        shifted = torch.tensor([vocabs["tgt"]["<s>"], *words])[None, :, None]
        with torch.no_grad():
            states, _ = network(read, shifted, torch.tensor([read.size(1)]))
            log_probs = network.generator(states)[0].log_softmax(dim=-1)
        total += float(log_probs[range(len(words)), words].sum())
        tokens += len(words)
    assert float(printed["GOLD"]) == pytest.approx(math.exp(-total / tokens), abs=0.01)
    scores, lengths = zip(
        *((float(line.split("\t")[1]), len(line.split("\t")[0].split())) for line in translated)
    )
    # Those that reach the maximum length have no end.
    counts = sum(lengths) + sum(length < 9 for length in lengths)
    assert float(printed["PRED"]) == pytest.approx(math.exp(-sum(scores) / counts), abs=0.01)


@pytest.mark.slow_except("copying rnn")
@pytest.mark.parametrize("kind", ["copying transformer", "copying rnn"])
def test_gold_scores_do_not_depend_on_the_batch(kind: str, learned: Learned, capfd: Capture) -> None:
    host, model = learned(kind)
    gold_scores = []
    for size in ("1", "7"):
        host.translate(model, "-tgt", host.folder / "test.tgt", "-batch_size", size)
        gold_scores.append(re.findall(r"GOLD SCORE: (\S+), GOLD PPL: (\S+)", capfd.readouterr().err))
    assert gold_scores[0] and gold_scores[0] == gold_scores[1]


def test_several_models_copy_together(learned: Learned) -> None:
    host, model = learned("copying transformer")
    assert host.translate([model, model]) == host.translate(model)


@pytest.mark.slow
def test_unknown_words_are_learned_to_be_copied(some_words: Host) -> None:
    options = {"copy_attn": True, "dropout": [0.0], "hidden_size": 32, "word_vec_size": 32}
    steps = {"learning_rate": 0.003, "train_steps": 500, "save_checkpoint_steps": 500}
    path = some_words.train("model", **UNTIED, **options, **steps)
    translations = some_words.translate(path)
    wanted = (some_words.folder / "test.src").read_text().splitlines()
    words = [pair for lines in zip(translations, wanted) for pair in zip(*map(str.split, lines))]
    assert sum(word == other for word, other in words) > 0.5 * len(words)


PADDING = 1


def by_hand(generator: Any, hidden: Tensor, attention: Tensor, source: Tensor) -> Tensor:
    """Pointer-generator networks, Eq. 9: ``p(w) = p_copy sum attention + (1 - p_copy) p_vocabulary``.

    Args:
        hidden: ``(N, D)`` of one sentence.
        attention: ``(N, S)``.
        source: ``(S, W)`` one-hot, which of its own words each place of the sentence has.
    """
    embedding = generator.linear.embedding
    log_probs = embedding.log_prob(hidden)
    words = torch.arange(embedding.num_embeddings) != PADDING
    vocabulary = torch.zeros_like(log_probs)
    vocabulary[:, words] = log_probs[:, words].softmax(dim=1)
    copying = torch.sigmoid(hidden @ generator.linear_copy.weight.T + generator.linear_copy.bias)
    return torch.cat([(1 - copying) * vocabulary, copying * (attention @ source)], dim=1)


@pytest.mark.slow_except("standard")
@pytest.mark.parametrize("method", METHODS)
def test_copy_mixture_follows_the_equation(method: str, trained: Trained) -> None:
    host, path = trained(embedding=METHODS[method], copy_attn=True)
    model = built(path)
    generator, embedding = model.generator, model.decoder.embeddings.emb_luts[0]
    assert generator.linear.embedding is embedding and shared_embeddings_of(model) == [embedding]
    hidden = torch.randn(5, 16)
    attention, source = torch.rand(5, 4).softmax(dim=1), torch.eye(3)[[0, 1, 2, 1]]
    mixture = generator(hidden, attention, source.unsqueeze(0))
    torch.testing.assert_close(mixture, by_hand(generator, hidden, attention, source))
    torch.testing.assert_close(mixture.sum(dim=1), torch.ones(5))

    gradients = []
    for probabilities in (mixture, by_hand(generator, hidden, attention, source)):
        model.zero_grad()
        probabilities[:, [5, 30, 70, -1]].log().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in generator.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    assert len(host.translate(path)) == 7


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_tensors_and_counts(is_tied: bool, trained: Trained) -> None:
    tying = {"embedding": FUNNEL} if is_tied else {"output_embedding": FUNNEL, **UNTIED}
    _, path = trained(copy_attn=True, **tying)
    _, body, head = read_weights(str(path))
    copy_layer = {"linear_copy.weight", "linear_copy.bias"}
    funnel = {f"linear.embedding.{name}" for name in built(path).generator.linear.embedding.state_dict()}
    assert head.keys() == (copy_layer if is_tied else copy_layer | funnel)
    counts = describe_checkpoint(path)
    size = se.num_parameters("funnel", num_embeddings=88, embedding_dim=16, rank=4)
    gate = 16 + 1
    assert counts["output"] == gate + (0 if is_tied else size)
    assert counts["total"] == sum(parameter.numel() for parameter in built(path).parameters())
    assert counts["stored_bits"] == 32 * counts["total"]
    tables = 1 if is_tied else 3
    assert counts["dense_total"] == tables * 88 * 16 + gate + counts["rest"]


def test_server_copies(trained: Trained, tmp_path: Path) -> None:
    _, path = trained(embedding=FUNNEL, copy_attn=True)
    shutil.copy(path, tmp_path / "model.pt")
    settings = {"model": "model.pt", "opt": {"gpu": -1, "beam_size": 1, "min_length": 1}}
    (tmp_path / "server.json").write_text(json.dumps({"models_root": str(tmp_path), "models": [settings]}))
    models = Models()
    models.start(str(tmp_path / "server.json"))
    assert models.models[0].translate([SourceText("w1  w2")])[0][0]["tgt"]


@pytest.mark.slow_except("pytorch-tied")
@pytest.mark.parametrize("options", [{}, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("save_format", ["pytorch", "safetensors"])
def test_upstream_model_is_compressed(
    options: dict[str, Any], save_format: str, trained: Trained, tmp_path: Path
) -> None:
    host, path = trained(copy_attn=True, save_format=save_format, **options)
    assert len(host.translate(path)) == 7
    same, small = tmp_path / "same.pt", tmp_path / "small.pt"
    compress(path, "standard", same)
    compress(path, "projective", small, "--rank", 4)
    before, after = built(path).generator, built(same).generator
    asked = torch.randn(5, 16), torch.rand(5, 4).softmax(dim=1), torch.eye(3)[[0, 1, 2, 1]].unsqueeze(0)
    torch.testing.assert_close(after(*asked), before(*asked))
    methods = [embedding.method for embedding in shared_embeddings_of(built(small))]
    assert methods == ["projective"] * (3 if options else 1)
    assert torch.equal(built(small).generator.linear_copy.weight, before.linear_copy.weight)
    assert len(host.translate(small)) == 7
    further = ["-train_from", str(small), "-train_steps", "2"]
    run("onmt_train -config", host.config("further", copy_attn=True, **options), *further)


@pytest.mark.parametrize("options", [{}, {"embedding": FUNNEL}], ids=["upstream's own", "shared embedding"])
def test_trimmed_model_copies(options: dict[str, Any], trained: Trained, tmp_path: Path) -> None:
    host, path = trained(copy_attn=True, **options)
    texts = tmp_path / "text.src", tmp_path / "text.tgt"
    for text, content in zip(texts, (SOURCE, TARGET)):
        text.write_text(content)
    output = tmp_path / "trimmed.pt"
    assert trim("--model", path, "--text", *texts, "--output", output) == 0
    words = read_checkpoint(path)["vocab"]["tgt"]
    rows = [words.index(word) for word in read_checkpoint(output)["vocab"]["tgt"]]
    before, after = built(path), built(output)
    tables = [_table(words_module(model, "output")) for model in (before, after)]
    torch.testing.assert_close(tables[1], tables[0][rows])
    host.write("covered", SOURCE.splitlines())
    assert len(host.translate(output, source="covered")) == 3


def _table(module: Any) -> Tensor:
    """The table of an output layer of either kind."""
    return module.table() if isinstance(module, se.SharedEmbedding) else module.weight.detach()
