"""Adaptive input and softmax: by hand, by plain loops, against torch, with published sizes, and tied."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shared_embeddings as se
from tests.shared_embeddings.cases import CASES, Case, by_name
from tests.shared_embeddings.support import MemoryMeter, assert_same_gradients, each_of, gradients

ADAPTIVE_CASES = [case for case in CASES if case.method == "adaptive" and case.output]
each_adaptive = each_of(ADAPTIVE_CASES)


# Worked by hand


@pytest.fixture
def worked() -> se.SharedEmbedding:
    """Five words in bands {0, 1}, {2, 3}, {4}, D = 4, widths 4, 2, 1.

    For the hidden state (1, 2, 0, 0) the scores of the head are ln 1, ln 2, ln 3, ln 4 (two words, two
    clusters), so the probabilities 0.1 to 0.4; in the first cluster they are ln 1 and ln 3, so 1/4 and 3/4.
    """
    emb = se.build("adaptive", num_embeddings=5, embedding_dim=4, cutoffs=[2, 4], factor=2)
    values = {
        "tables.0": [[0.0, 0, 0, 0], [log(2), 0, 3, 0]],
        "tables.1": [[0.0, 5], [log(3) / 2, 7]],
        "tables.2": [[6.0]],
        "projections.1": [[0.0, 1, 0, 0], [0, 0, 0, 1]],
        "projections.2": [[0.5, 0, 0, 2]],
        "clusters": [[log(3), 0, 0, 9], [0, log(2), 0, 0]],
    }
    emb.load_state_dict({name: torch.tensor(value) for name, value in values.items()})
    return emb


HIDDEN = [1.0, 2, 0, 0]
PROBABILITIES = [0.1, 0.2, 0.3 / 4, 0.3 * 3 / 4, 0.4]


def test_vectors_and_probabilities_worked_by_hand(worked: se.SharedEmbedding) -> None:
    rows = worked(torch.tensor([[3, 0], [4, 1]]))
    assert rows[0, 0].tolist() == pytest.approx([0, log(3) / 2, 0, 7])
    assert rows[0, 1].tolist() == [0, 0, 0, 0]
    assert rows[1, 0].tolist() == [3, 0, 0, 12]
    assert rows[1, 1].tolist() == pytest.approx([log(2), 0, 3, 0])
    hidden = torch.tensor(HIDDEN)
    assert worked.log_prob(hidden).exp().tolist() == pytest.approx(PROBABILITIES, rel=1e-5)
    assert worked.logits(hidden).softmax(-1).tolist() == pytest.approx(PROBABILITIES, rel=1e-5)


def test_loss_worked_by_hand(worked: se.SharedEmbedding) -> None:
    """Smoothing 0.3 gives each of the five words 0.06, whatever band it is in."""
    hidden, targets = torch.tensor([HIDDEN] * 6), torch.tensor([4, 2, 7, 0, 3, 1])
    losses = [-log(PROBABILITIES[word]) for word in (4, 2, 0, 3, 1)]
    per_token = worked.cross_entropy(hidden, targets, ignore_index=7, reduction="none")
    assert per_token.tolist() == pytest.approx([*losses[:2], 0.0, *losses[2:]], rel=1e-5)
    for reduction, expected in (("sum", sum(losses)), ("mean", sum(losses) / 5)):
        loss = worked.cross_entropy(hidden, targets, ignore_index=7, reduction=reduction)
        assert loss.item() == pytest.approx(expected, rel=1e-5)
    smoothed = worked.cross_entropy(
        hidden[:5], torch.tensor([4, 2, 0, 3, 1]), label_smoothing=0.3, reduction="none"
    )
    assert smoothed.tolist() == pytest.approx([0.7 * loss + 0.06 * sum(losses) for loss in losses], rel=1e-5)


def test_gradients_worked_by_hand(worked: se.SharedEmbedding) -> None:
    """Probability minus one-hot target, times the vector that the entry meets; target 3 is in cluster 1."""
    worked.cross_entropy(torch.tensor([HIDDEN]), torch.tensor([3])).backward()
    grads = {name: parameter.grad.tolist() for name, parameter in worked.named_parameters()}
    assert grads["tables.0"][0] == pytest.approx([0.1, 0.2, 0, 0])
    assert grads["tables.0"][1] == pytest.approx([0.2, 0.4, 0, 0])
    assert grads["clusters"][0] == pytest.approx([-0.7, -1.4, 0, 0])
    assert grads["clusters"][1] == pytest.approx([0.4, 0.8, 0, 0])
    assert grads["tables.1"][0] == pytest.approx([0.5, 0])
    assert grads["tables.1"][1] == pytest.approx([-0.5, 0])
    assert grads["projections.1"][0] == pytest.approx([-log(3) / 8, -log(3) / 4, 0, 0])
    assert grads["tables.2"] == [[0]] and grads["projections.2"] == [[0, 0, 0, 0]]


def test_bias_worked_by_hand(worked: se.SharedEmbedding) -> None:
    """Of the head 1, 2, 3 and 4 become 2, 2, 3 and 8; of the first cluster 1 and 3 become 2 and 3."""
    sizes = {"num_embeddings": 5, "embedding_dim": 4}
    emb = se.build("adaptive", **sizes, cutoffs=[2, 4], factor=2, output_bias=True)
    bias = {"bias": [log(2), 0, log(2), 0, 5], "cluster_bias": [0, log(2)]}
    emb.load_state_dict(worked.state_dict() | {name: torch.tensor(value) for name, value in bias.items()})
    hidden = torch.tensor([HIDDEN])
    probabilities = [2 / 15, 2 / 15, 3 / 15 * 2 / 5, 3 / 15 * 3 / 5, 8 / 15]
    assert emb.log_prob(hidden).exp()[0].tolist() == pytest.approx(probabilities, rel=1e-5)
    smoothed = emb.cross_entropy(hidden, torch.tensor([2]), label_smoothing=0.3)
    expected = -0.7 * log(probabilities[2]) - 0.06 * sum(log(value) for value in probabilities)
    assert smoothed.item() == pytest.approx(expected, rel=1e-5)
    loss = emb.cross_entropy(hidden, torch.tensor([3]))
    assert loss.item() == pytest.approx(-log(probabilities[3]), rel=1e-5)
    loss.backward()
    assert emb.bias.grad.tolist() == pytest.approx([2 / 15, 2 / 15, 2 / 5, -2 / 5, 0], abs=1e-6)
    assert emb.cluster_bias.grad.tolist() == pytest.approx([-12 / 15, 8 / 15], rel=1e-5)
    # Words that weigh 2, 1, 3, 5 and 4 are clusters that weigh 8 and 4.
    emb.set_output_bias(torch.tensor([2.0, 1, 3, 5, 4]).log())
    assert emb.cluster_bias.exp().tolist() == pytest.approx([8, 4], rel=1e-5)


def test_a_cluster_can_outweigh_the_most_probable_word(worked: se.SharedEmbedding) -> None:
    """With probabilities 3, 5, 6 and 1 in 15, cluster 1 leads, but its words have 1.5 and 4.5."""
    with torch.no_grad():
        worked.tables["0"][0, 0] = log(3)
        worked.tables["0"][1, 0] = log(5)
        worked.clusters[0, 0] = log(6)
        worked.clusters[1, 1] = 0.0
    hidden = torch.tensor([HIDDEN])
    _, predictions = worked.cross_entropy_and_predictions(hidden, torch.tensor([0]))
    assert predictions.tolist() == [1]
    with torch.no_grad():
        worked.tables["1"][1, 0] = log(9) / 2  # now 0.6 and 5.4
    _, predictions = worked.cross_entropy_and_predictions(hidden, torch.tensor([0]))
    assert predictions.tolist() == [3]


# By plain loops


def naive_vector(emb: Any, word: int, output: bool) -> tuple[int, Tensor]:
    """The band of a word, and its vector ``(D,)`` on the input or the output side."""
    tables = emb.output_tables if output and emb.options.tie == "none" else emb.tables
    band, start = 0, 0
    for number, cutoff in enumerate(emb.options.cutoffs, start=1):
        if word >= cutoff:
            band, start = number, cutoff
    vector = tables[str(band)][word - start] if emb.map is None else emb.map.rows(torch.tensor([word]))[0]
    vector = naive_projected(emb, band, vector, output)
    return band, vector * 0 if word == emb.padding_idx else vector


def naive_projected(emb: Any, band: int, vector: Tensor, output: bool) -> Tensor:
    """A vector ``(d_i,)`` of a band as wide as the input or the output side has it."""
    projections = emb.output_projections if output and emb.options.tie != "all" else emb.projections
    width = emb.score_dim if output else emb.embedding_dim
    projected_heads = {"none": [], "input": [False], "both": [False, True]}[emb.options.head_projection]
    if len(vector) != width or (band == 0 and output in projected_heads):
        return vector @ projections[str(band)]
    return vector


def naive_log_prob(emb: Any, hidden: Tensor) -> Tensor:
    """The log-probabilities ``(n, V)`` of hidden states ``(n, D)``, one word and one band after the other."""
    scores: list[list[Tensor]] = [[] for _ in range(len(emb.options.cutoffs) + 1)]
    for word in range(emb.num_embeddings):
        band, vector = naive_vector(emb, word, output=True)
        scores[band].append(hidden @ vector)
        if emb.bias is not None and word != emb.padding_idx:
            scores[band][-1] = scores[band][-1] + emb.bias[word]
    clusters = [hidden @ naive_projected(emb, 0, vector, output=True) for vector in emb.clusters]
    if emb.bias is not None:
        clusters = [score + emb.cluster_bias[number] for number, score in enumerate(clusters)]
    head = torch.stack(scores[0] + clusters, dim=1).log_softmax(1)
    logs = [head[:, : len(scores[0])]]
    for number, tail in enumerate(scores[1:], start=len(scores[0])):
        logs.append(torch.stack(tail, dim=1).log_softmax(1) + head[:, number, None])
    return torch.cat(logs, dim=1)


def exact(case: Case) -> tuple[se.SharedEmbedding, Tensor]:
    """An embedding in double precision, and hidden states for it."""
    return case.build().double(), case.hidden(9, scale=3.0).detach().double().requires_grad_()


@each_adaptive
def test_vectors_equal_the_naive_ones(case: Case) -> None:
    emb = case.build()
    expected = torch.stack([naive_vector(emb, word, output=False)[1] for word in range(case.num_embeddings)])
    torch.testing.assert_close(emb.table(), expected)
    order = torch.randperm(case.num_embeddings)
    weight = torch.randn(expected.shape)
    torch.testing.assert_close(emb(order), expected[order])
    assert_same_gradients(
        gradients(emb, (emb(order) * weight).sum()), gradients(emb, (expected[order] * weight).sum())
    )


@each_adaptive
def test_probabilities_equal_the_naive_ones(case: Case) -> None:
    emb, hidden = exact(case)
    expected = naive_log_prob(emb, hidden)
    actual = emb.log_prob(hidden)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual.exp().sum(-1), torch.ones(9, dtype=torch.float64))
    weight = torch.randn_like(expected)
    assert_same_gradients(
        gradients(emb, (actual * weight).sum(), hidden),
        gradients(emb, (expected * weight).sum(), hidden),
        rtol=1e-7,
        atol=1e-9,
    )


@pytest.mark.parametrize(
    "words", [[4, 0, 8], [9, 19, 10], [20, 36, 36, 25], [20, 3], [9]], ids=lambda words: str(words)
)
def test_bands_without_a_target_change_nothing(words: list[int]) -> None:
    emb = by_name("adaptive-untied").build().double()
    hidden, targets = torch.randn(len(words), 24, dtype=torch.float64), torch.tensor(words)
    expected = F.nll_loss(naive_log_prob(emb, hidden), targets)
    actual = emb.cross_entropy(hidden, targets)
    torch.testing.assert_close(actual, expected)
    assert_same_gradients(gradients(emb, actual), gradients(emb, expected), rtol=1e-7, atol=1e-9)


@each_adaptive
@pytest.mark.parametrize("lift", [-2.0, 1.5, 6.0])
def test_predictions_are_the_most_probable_words_of_any_band(case: Case, lift: float) -> None:
    """More tokens than are processed at a time, with clusters made less or more probable."""
    emb = case.build().double()
    hidden = case.hidden(1100, scale=2.0).detach().double()
    hidden[:, 0] = 1.0
    with torch.no_grad():
        emb.clusters[:, 0] += lift
    expected = emb.log_prob(hidden).argmax(-1)
    assert (expected >= case.options["cutoffs"][0] if lift > 2 else expected < 30).any()
    _, predictions = emb.cross_entropy_and_predictions(hidden, torch.zeros(1100, dtype=torch.int64))
    assert torch.equal(predictions, expected)


TOKENS, VOCABULARY, WIDTH = 2048, 4000, 64
SCORES = TOKENS * VOCABULARY * 4


def large(**options: Any) -> se.SharedEmbedding:
    """An embedding whose scores for all tokens would be larger than anything else."""
    settings: dict[str, Any] = {"cutoffs": [200, 1000], "padding_idx": 1} | options
    return se.build("adaptive", num_embeddings=VOCABULARY, embedding_dim=WIDTH, **settings)


def test_predictions_need_no_more_memory() -> None:
    """With the most probable clusters, all tokens search their word there."""
    emb = large().eval()
    hidden = torch.randn(TOKENS, WIDTH)
    hidden[:, 0] = 1.0
    with torch.no_grad():
        emb.clusters[:, 0] = 20.0
    targets = torch.randint(VOCABULARY, (TOKENS,))
    with torch.no_grad(), MemoryMeter(hidden, targets, *emb.parameters()) as meter:
        _, predictions = emb.cross_entropy_and_predictions(hidden, targets)
    assert (predictions >= 200).all()
    assert meter.largest < SCORES / 4
    assert meter.peak < SCORES


def test_a_lookup_never_builds_the_table() -> None:
    emb = large()
    ids = torch.randint(VOCABULARY, (50,))
    with MemoryMeter(ids, *emb.parameters()) as meter:
        emb(ids).square().sum().backward()
    assert meter.largest < VOCABULARY * WIDTH * 4 / 4


WORDS, DIM, NARROW, CUTOFFS = 37, 24, 10, [9, 20]
SIZES: dict[str, Any] = {"num_embeddings": WORDS, "embedding_dim": DIM, "cutoffs": CUTOFFS}
CODES = {"map": "compositional_code", "map_options": {"num_codebooks": 3, "codebook_size": 4}}


def build(seed: int = 0, **options: Any) -> Any:
    """An embedding in double precision, its bias drawn, too."""
    torch.manual_seed(seed)
    emb = se.build("adaptive", **SIZES, **options).double()
    for name, parameter in emb.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return emb


def loaded(emb: se.SharedEmbedding, **values: Any) -> Any:
    """An embedding with these parameters, dots in their names written as double underscores."""
    state = {name.replace("__", "."): torch.tensor(value) for name, value in values.items()}
    emb.load_state_dict(state)
    return emb


def test_a_first_projection_on_the_input_only_worked_by_hand() -> None:
    """Words {0, 1} and {2}, D = 2: W_1 swaps the axes of the input; scores do not use it."""
    sizes = {"num_embeddings": 3, "embedding_dim": 2, "cutoffs": [2], "factor": 2}
    values: dict[str, Any] = {
        "tables__0": [[log(2), 7.0], [0.0, 5.0]],
        "tables__1": [[3.0]],
        "projections__0": [[0.0, 1.0], [1.0, 0.0]],
        "projections__1": [[4.0, 6.0]],
        "clusters": [[log(5), 0.0]],
    }
    emb = loaded(se.build("adaptive", **sizes, head_projection="input"), **values)
    torch.testing.assert_close(emb.table(), torch.tensor([[7.0, log(2)], [5.0, 0.0], [12.0, 18.0]]))
    probabilities = emb.log_prob(torch.tensor([1.0, 0.0])).exp()
    assert probabilities.tolist() == pytest.approx([2 / 8, 1 / 8, 5 / 8], rel=1e-5)
    both = loaded(se.build("adaptive", **sizes, head_projection="both"), **values)
    assert torch.equal(both.table(), emb.table())
    # Swapped, the hidden state meets the second axis of words and of clusters.
    weights = torch.tensor([7.0, 5.0, 0.0]).exp()
    expected = (weights / weights.sum()).tolist()
    assert both.log_prob(torch.tensor([1.0, 0.0])).exp().tolist() == pytest.approx(expected, rel=1e-5)


def test_narrow_bands_worked_by_hand() -> None:
    """Words {0} and {1, 2}, D = 2, all bands one wide, a projection for each."""
    sizes = {"num_embeddings": 3, "embedding_dim": 2, "cutoffs": [1], "factor": 1, "width": 1}
    emb = loaded(
        se.build("adaptive", **sizes, output_bias=True),
        tables__0=[[log(2)]],
        tables__1=[[0.0], [log(2)]],
        projections__0=[[1.0, 3.0]],
        projections__1=[[0.0, 2.0]],
        clusters=[[0.0]],
        bias=[0.0, 0.0, log(3)],
        cluster_bias=[log(4)],
    )
    torch.testing.assert_close(emb.table(), torch.tensor([[1.0, 3.0], [0.0, 0.0], [0.0, 2.0]]) * log(2))
    # The head sees 1 * 1 + 3 * 0 = 1: 2 against 4. The tail sees 2 * 0 = 0: 1 against 3.
    probabilities = emb.log_prob(torch.tensor([1.0, 0.0])).exp()
    assert probabilities.tolist() == pytest.approx([1 / 3, 2 / 3 / 4, 2 / 3 * 3 / 4], rel=1e-5)


# Sizes


@pytest.mark.parametrize(
    ("width", "printed"), [(410, 110.04), (384, 103.08), (256, 69.20), (128, 34.73), (64, 17.50)]
)
def test_sizes_of_the_second_table_of_define(width: int, printed: float) -> None:
    """V n + V, four times 384 n where n is not 384, and n + 1 for each of three clusters."""
    words, dim = 267_735, max(width, 384)
    sizes = {"num_embeddings": words, "cutoffs": [20_000, 40_000, 200_000], "factor": 1, "output_bias": True}
    narrow = {"width": width} if width < dim else {}
    projections = 4 * width * dim if narrow else 0
    expected = words * width + words + projections + 3 * (width + 1)
    assert se.num_parameters("adaptive", embedding_dim=dim, **sizes, **narrow) == expected
    assert expected / 1e6 == pytest.approx(printed, abs=0.005)
    if narrow:
        tying = {"score_dim": dim, "tie": "tables"}
        assert se.num_parameters("adaptive", embedding_dim=width, **sizes, **tying) == expected


# One table for all bands


def test_another_table_replaces_all_bands() -> None:
    emb = build(factor=1, width=NARROW, output_bias=True)
    plain = emb.inner_embedding()
    assert plain.method == "standard" and plain.weight.shape == (WORDS, NARROW)
    fitted, _ = se.fit("projective", plain.weight.detach(), rank=NARROW, progress=False, output_bias=True)
    new = emb.with_inner_embedding(fitted.double())
    assert new.inner_embedding().method == "projective" and not new.inner_embedding().options.output_bias
    hidden = torch.randn(5, DIM, dtype=torch.float64)
    torch.testing.assert_close(new.log_prob(hidden), emb.log_prob(hidden), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(new.table(), emb.table(), rtol=1e-4, atol=1e-5)
    assert new.counts()["total"] == emb.counts()["total"] + NARROW * NARROW
    # The stored options rebuild it.
    again = se.build("adaptive", num_embeddings=WORDS, embedding_dim=DIM, **new.stored_options()).double()
    again.load_state_dict(new.state_dict())
    assert torch.equal(again.table(), new.table())


def test_a_map_with_dropout_draws_per_input_token() -> None:
    alone = {"hidden_dim": 40, "codebook_size": 5, "relu_dropout": 0.5}
    emb = build(factor=1, width=NARROW, map="alone", map_options=alone).train()
    first, second, other = emb(torch.tensor([5, 5, 30]))
    assert not torch.equal(first, second)
    hidden = torch.randn(4, DIM, dtype=torch.float64)
    assert torch.equal(emb.log_prob(hidden), emb.log_prob(hidden))
    of_word = emb.table()[30]
    torch.testing.assert_close(emb(torch.full((4000,), 30)).mean(0), of_word, rtol=0, atol=0.05)
    assert (other - of_word).abs().max() > 1e-3
    torch.testing.assert_close(emb.eval()(torch.tensor([30]))[0], of_word)


def test_stored_options_of_a_map_name_no_file() -> None:
    classes = [number % 5 for number in range(WORDS)]
    emb = build(factor=1, map="uncle", map_options={"unique_dim": 6, "classes": classes})
    stored = emb.stored_options()
    assert stored["map_options"]["classes"] == "stored"
    again: Any = se.build("adaptive", num_embeddings=WORDS, embedding_dim=DIM, **stored).double()
    again.load_state_dict(emb.state_dict())
    assert torch.equal(again.table(), emb.table())
    assert emb.map.classes[:, 0].tolist() == again.map.classes[:, 0].tolist() == classes


# Fits


def test_narrow_bands_are_fitted_with_the_least_squared_error() -> None:
    teacher = torch.randn(WORDS, DIM, generator=torch.Generator().manual_seed(1))
    emb, _ = se.fit("adaptive", teacher, cutoffs=CUTOFFS, factor=1, width=4, progress=False)
    missed = 0.0
    for block in teacher.split([9, 11, 17]):
        missed += float(torch.linalg.svdvals(block)[4:].square().sum())
    assert (emb.table() - teacher).square().sum().item() == pytest.approx(missed, rel=1e-4)


@pytest.mark.parametrize("side", ["none", "input", "both"])
def test_a_fit_gives_clusters_the_scores_of_their_mean_words(side: str) -> None:
    teacher = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
    emb: Any
    emb, report = se.fit(
        "adaptive", teacher, cutoffs=[20, 40], factor=1, head_projection=side, progress=False
    )
    assert report.relative_error < 1e-5
    torch.testing.assert_close(emb.output_table(), teacher, rtol=1e-4, atol=1e-5)
    head = emb.projections["0"] if side == "both" else torch.eye(8)
    means = torch.stack([teacher[20:40].mean(0), teacher[40:].mean(0)])
    torch.testing.assert_close(emb.clusters @ head, means, rtol=1e-4, atol=1e-5)


# Against torch's own adaptive softmax


def test_agrees_with_the_adaptive_softmax_of_torch() -> None:
    emb = se.build("adaptive", num_embeddings=53, embedding_dim=32, cutoffs=[10, 17, 40], factor=2)
    other = nn.AdaptiveLogSoftmaxWithLoss(32, 53, [10, 17, 40], div_value=2.0)
    with torch.no_grad():
        other.head.weight.copy_(torch.cat([emb.tables["0"], emb.clusters]))
        for band, (down, up) in enumerate(other.tail, start=1):
            down.weight.copy_(emb.projections[str(band)])
            up.weight.copy_(emb.tables[str(band)])
    hidden, targets = torch.randn(200, 32, requires_grad=True), torch.randint(53, (200,))
    torch.testing.assert_close(emb.log_prob(hidden), other.log_prob(hidden), rtol=1e-4, atol=1e-5)
    output, loss = other(hidden, targets)
    torch.testing.assert_close(-emb.cross_entropy(hidden, targets, reduction="none"), output)
    mean, predictions = emb.cross_entropy_and_predictions(hidden, targets)
    torch.testing.assert_close(mean, loss)
    assert torch.equal(predictions, other.predict(hidden))
    (wanted,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(torch.autograd.grad(mean, hidden)[0], wanted)
    head = torch.autograd.grad(other(hidden, targets)[1], other.head.weight)[0]
    grads = gradients(emb, emb.cross_entropy(hidden, targets))
    torch.testing.assert_close(torch.cat([grads["tables.0"], grads["clusters"]]), head)


# Initialization


@pytest.mark.parametrize("options", [{}, {"head_projection": "both", "tie": "none"}], ids=["plain", "untied"])
def test_vectors_of_every_band_start_with_the_same_std(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    emb = large(**options)
    for table in (emb.table(), emb.output_table()):
        for low, high in ((2, 200), (200, 1000), (1000, VOCABULARY)):
            assert table[low:high].std().item() == pytest.approx(WIDTH**-0.5, rel=0.3)
    assert emb.clusters.std().item() == pytest.approx(WIDTH**-0.5, rel=0.3)


# Sizes and tying


@pytest.mark.parametrize(
    ("factor", "bands", "ratio"),
    [
        (4, (15000, 21000, 4728), 1.96),
        (4, (4000, 8000, 28728), 5.12),
        (4, (2000, 4000, 34728), 7.64),
        (4, (600, 1200, 38928), 11.66),
        (8, (1000, 5000, 34728), 18.18),
        (8, (500, 4500, 35724), 24.06),
    ],
)
def test_reductions_of_the_uncle_paper(factor: int, bands: tuple[int, ...], ratio: float) -> None:
    """Table 12: Eq. 9 without the projection of the first band; it leaves out the clusters."""
    words = sum(bands)
    count = se.num_parameters(
        "adaptive",
        num_embeddings=words,
        embedding_dim=512,
        cutoffs=[bands[0], bands[0] + bands[1]],
        factor=factor,
        output="none",
    )
    assert words * 512 / count == pytest.approx(ratio, abs=0.01)


TABLES, PROJECTIONS, CLUSTERS = 9 * 24 + 11 * 12 + 17 * 6, (12 + 6) * 24, 2 * 24


@pytest.mark.parametrize(
    ("options", "sides"),
    [
        ({}, (0, CLUSTERS, TABLES + PROJECTIONS)),
        ({"head_projection": "both"}, (0, CLUSTERS, TABLES + PROJECTIONS + 24 * 24)),
        ({"head_projection": "input"}, (24 * 24, CLUSTERS, TABLES + PROJECTIONS)),
        ({"factor": 1}, (0, CLUSTERS, 37 * 24)),
        ({"factor": 1, "width": 10}, (0, 2 * 10, 37 * 10 + 3 * 10 * 24)),
        ({"factor": 1, "tie": "tables", "score_dim": 30}, (0, 3 * 24 * 30 + CLUSTERS, 37 * 24)),
        ({"factor": 1, "map": "projective", "map_options": {"rank": 4}}, (0, CLUSTERS, 4 * (37 + 24))),
        ({"tie": "tables"}, (PROJECTIONS, PROJECTIONS + CLUSTERS, TABLES)),
        ({"tie": "none"}, (TABLES + PROJECTIONS, TABLES + PROJECTIONS + CLUSTERS, 0)),
        ({"output": "none"}, (TABLES + PROJECTIONS, 0, 0)),
    ],
    ids=[
        "all",
        "head projection",
        "input projection",
        "factor one",
        "narrow",
        "other states",
        "map",
        "tables",
        "none",
        "input only",
    ],
)
def test_parameters_of_each_side_counted_by_hand(
    options: dict[str, Any], sides: tuple[int, int, int]
) -> None:
    """37 words in bands of 9, 11 and 17, with widths 24, 12 and 6."""
    settings: dict[str, Any] = {"num_embeddings": 37, "embedding_dim": 24, "cutoffs": [9, 20], "factor": 2}
    settings |= options
    counts = se.build("adaptive", **settings).counts()
    assert (counts["input"], counts["output"], counts["shared"]) == sides
    assert counts["total"] == sum(sides) == se.num_parameters("adaptive", **settings)
