"""Compressed checkpoints without a host: counts, targets, agreement with the original, and checksums."""

from __future__ import annotations

import contextlib
import hashlib
import math
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shared_embeddings as se
from shared_embeddings.checkpoints import (
    load_tensors,
    recorded_checksum,
    save_safetensors,
    stamp_safetensors,
    state_digest,
    verify,
    with_checksum,
)
from shared_embeddings.compress.fit_tables import Errors
from shared_embeddings.compress.host import copy_output_bias, teacher_table
from shared_embeddings.compress.measure import (
    USABLE_SHARE,
    Batch,
    Comparison,
    Perplexity,
    Quality,
    QualityReport,
    Retention,
    Samples,
    ScoredWords,
    Validation,
    compare,
    margin,
    sampled_lines,
)
from shared_embeddings.compress.sizing import Target, options_within, stored_bytes
from shared_embeddings.utils.errors import UserError
from shared_embeddings.words.token_counts import count_words, counts_of, read_counts
from tests.helpers import Bomb


def test_counts_of_words(tmp_path: Path) -> None:
    counts, text = tmp_path / "counts", tmp_path / "text"
    counts.write_text("a\t5\nb c\t2\n")
    assert read_counts(counts) == {"a": 5, "b c": 2}
    for wrong in ("\t" + "9" * 19, "\t" + "9" * 5000, "\t1_0", "\t\u0663", " 7"):
        (tmp_path / "wrong").write_text(f"a\t5\nb{wrong}\n", encoding="utf-8")
        with pytest.raises(ValueError, match="line 2 is 'b"):
            read_counts(tmp_path / "wrong")
    (tmp_path / "wrong").write_text("a\t5\nb\t1\na\t2\n")
    with pytest.raises(ValueError, match="line 3 repeats the word 'a'"):
        read_counts(tmp_path / "wrong")
    text.write_text("a b a\nb a\n")
    assert count_words([text, text]) == {"a": 6, "b": 4}
    text.write_text("\ufeffa b a\nb a\n", encoding="utf-8")  # as some editors start a file
    assert count_words([text]) == {"a": 3, "b": 2}
    frequencies = counts_of(["<s>", "a", "zero", "never"], {"a": 6, "zero": 0, "b": 9}, ["<s>"])
    assert frequencies.tolist() == [9, 6, 1, 1]


@pytest.mark.parametrize("method", ["projective", "structured", "compositional_code"])
def test_target_is_met_in_bytes_with_the_finest_options(method: str) -> None:
    limit = 4 * 600 * 32 // 4
    options = options_within(method, 600, 32, limit)
    built = se.build(method, num_embeddings=600, embedding_dim=32, **options)
    assert 0.6 * limit < stored_bytes(built, "fp32") <= limit
    assert built.counts()["stored_bits"] <= 8 * limit


def test_the_bias_of_the_output_is_within_the_target() -> None:
    """The bytes of rank 8 are 632 numbers more than those of rank 7, enough for the bias of 600 words."""
    limit = 4 * (600 + 32) * 8
    assert options_within("projective", 600, 32, limit) == {"rank": 8}
    assert options_within("projective", 600, 32, limit, output_bias=True) == {"rank": 7, "output_bias": True}


SIZES: dict[str, Any] = {"num_embeddings": 6, "embedding_dim": 4}


@pytest.mark.parametrize(
    ("method", "options", "note"),
    [
        ("standard", {"output_bias": True}, None),
        ("define", {"map_dim": 4, "expand_dim": 8, "depth": 1, "output_bias": True}, None),
        ("projective", {"rank": 2}, "dropped; set output_bias: true"),
        ("adaptive", {"cutoffs": [2, 4], "factor": 1, "output_bias": True}, "approximates"),
    ],
)
def test_bias_is_copied_with_a_note_of_its_loss(
    method: str, options: dict[str, Any], note: str | None
) -> None:
    new, bias = se.build(method, **SIZES, padding_idx=1, **options), torch.arange(6.0)
    notes = copy_output_bias(new, bias)
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]
    copied = new.output_bias()
    if "output_bias" in options:
        assert copied is not None and copied.tolist() == [0, 0, 2, 3, 4, 5]
    else:
        assert copied is None


def test_total_is_divided_in_proportion_to_the_tables() -> None:
    for target in (Target(total_bytes=400), Target(ratio=4)):
        tables = [torch.empty(size, dtype=torch.int8) for size in (1200, 400)]
        assert [target.limit(table, tables) for table in tables] == [300, 100]
    half = torch.empty(100, dtype=torch.bfloat16)
    assert Target(bits=2).limit(half, [half]) == 25 and Target(ratio=2).limit(half, [half]) == 100


def test_bands_follow_the_counts() -> None:
    teacher = torch.ones(250, 4)
    embedding = se.build("standard", num_embeddings=250, embedding_dim=4, padding_idx=0)
    counts = torch.arange(250)
    with torch.no_grad():
        embedding.weight.copy_(teacher)
        embedding.weight[200:] *= 1.5  # of the 100 most frequent words, 150 to 249, the upper half
    top, rest = Errors(embedding, teacher.__getitem__, counts=counts).bands()
    assert (top.first, top.last, rest.first, rest.last) == (1, 100, 101, 249)
    # Each missed row is off by 0.5 in 4 dimensions, a distance of 1, with rows of length 2.
    assert top.loss == pytest.approx(0.5) and top.relative_error == pytest.approx((50 / 400) ** 0.5)
    assert rest.loss == 0.0


def test_a_separate_output_table_has_no_teacher() -> None:
    untied = se.build("adaptive", num_embeddings=50, embedding_dim=16, cutoffs=[10, 30])
    with pytest.raises(ValueError, match="not its input table"):
        teacher_table(untied, is_scored=True)
    assert teacher_table(untied, is_scored=False).shape == (50, 16)


@pytest.mark.parametrize("ratio", [3, 8, 20])
@pytest.mark.parametrize("exponent", [0.8, 1.1])
def test_group_reduce_meets_a_target_without_zipfs_law(ratio: int, exponent: float) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(4000, 64, generator=generator)
    counts = (1e6 / torch.arange(1.0, 4001.0) ** exponent)[torch.randperm(4000, generator=generator)]
    limit = table.nbytes // ratio
    options: dict[str, Any] = options_within("group_reduce", 4000, 64, limit)
    _, report = se.fit("group_reduce", table, token_counts=counts, progress=False, **options)
    assert 0.98 * limit <= report.stored_bits / 8 <= limit


def test_structured_takes_small_pieces_and_few_clusters_for_many_words() -> None:
    bytes_of_a_table = 4 * 262_144 * 640
    for ratio, width in ((4, 1), (8, 2), (16, 5)):
        options = options_within("structured", 262_144, 640, bytes_of_a_table // ratio)
        assert options["num_groups"] == 640 // width
        assert options["num_clusters"] <= 512


def test_memory_counts_each_block_once() -> None:
    """Scores of a plain table come from the table itself; a funnel caches its codes after the ReLU."""
    plain = se.build("standard", num_embeddings=100, embedding_dim=8).eval()
    funnel = se.build("funnel", num_embeddings=100, embedding_dim=8, rank=4).eval()
    parameter_bytes = sum(parameter.nbytes for parameter in funnel.parameters())
    with torch.no_grad():
        assert se.accounting.bytes_in_memory(funnel) == parameter_bytes
        plain.logits(torch.zeros(1, 8))
        funnel.logits(torch.zeros(1, 8))
        cached = se.accounting.bytes_in_memory(funnel) - parameter_bytes
    assert se.accounting.bytes_in_memory(plain) == 4 * 100 * 8
    assert cached >= 4 * 100 * 4


TEXT = Validation(text=Path("text"))


class SavedModel:
    """A model with a quality and predictions that tests change."""

    def __init__(self, measure: str = "BLEU", value: float = 0.0) -> None:
        self.measured = Quality(measure, value, "of a text")
        self.shares = [[0.5, 0.3, 0.2], [0.2, 0.7, 0.1]]
        self.asked: list[tuple[Sequence[Path] | None, int]] = []

    def quality(self, validation: Validation) -> Quality:
        assert validation is TEXT
        return self.measured

    def samples(self, texts: Sequence[Path] | None, seed: int, tokens: int) -> Samples:
        self.asked.append((texts, seed))
        targets = torch.tensor([0, 2])

        def predict(_: object) -> Batch:
            return Batch(torch.tensor(self.shares).log() + 3, None, targets)

        return Samples("2 tokens", [None], predict)


Logs = list[tuple[torch.Tensor, torch.Tensor | None]]


def logs(shares: list[list[float]], targets: list[int] | None = None) -> Logs:
    """The log-probabilities of one part."""
    return [(torch.tensor(shares).log(), None if targets is None else torch.tensor(targets))]


def test_confident_predictions_count_more() -> None:
    before = logs([[0.4, 0.3, 0.3], [0.3, 0.5, 0.2], [0.35, 0.25, 0.4]])
    # (0.4 + 0.4) / 1.3; the confidence of the other model does not matter.
    after = logs([[0.8, 0.1, 0.1], [0.5, 0.4, 0.1], [0.1, 0.1, 0.8]])
    assert compare(before, after)["share"] == pytest.approx(0.8 / 1.3)
    assert compare(before, before)["share"] == 1.0


def test_divergence_and_perplexities_by_hand() -> None:
    before = logs([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]], [0, 1])
    after = logs([[0.25, 0.5, 0.25], [0.5, 0.5, 0.0]])
    result = compare(before, after)
    # Words without a probability before do not count.
    assert result["kl"] == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2) + math.log(2)) / 2)
    assert result["perplexity"].before == pytest.approx(2**0.5)
    assert result["perplexity"].after == pytest.approx((4 * 2) ** 0.5)
    assert compare(before, before)["kl"] == 0
    assert compare(logs([[1.0]]), logs([[1.0]]))["perplexity"] is None
    two = [*logs([[0.5, 0.25, 0.25]], [0]), *logs([[0.0, 1.0, 0.0]], [1])]
    parts = compare(two, [(rows[None], None) for rows in after[0][0]])
    assert math.isinf(result["margin"]) and parts["share"] == result["share"] and parts["kl"] == result["kl"]


def test_the_interval_of_a_mean_over_windows() -> None:
    """Of four equal windows: 3.182 standard errors, the quantile of Student's distribution."""
    nats, tokens = torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.full((4,), 10.0)
    assert margin(nats, tokens) == pytest.approx(3.182 * (14 / 3) ** 0.5 / 2 / 10, rel=0.05)
    many = torch.tensor([0.0, 1.0] * 200)
    assert margin(many, torch.ones(400)) == pytest.approx(1.966 * 0.5 / 399**0.5, rel=1e-3)
    # A window with more tokens of the same mean changes nothing.
    assert margin(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0])) == 0.0
    text = Perplexity.of(torch.tensor([20.0, 20.0]), torch.tensor([22.0, 20.0]), torch.tensor([10.0, 10.0]))
    assert text.change == pytest.approx(math.exp(0.1) - 1.0) and text.described().startswith("+10.5 % ± ")


def test_predictions_of_some_words_stand_for_those_of_all() -> None:
    """The third word stands for itself and the second one."""
    model, words = SavedModel(), ScoredWords(torch.tensor([0, 2]), torch.tensor([0.0, math.log(2)]), 3)
    compared = Comparison(model, None, [Path("a")], 5, scoring=lambda _: contextlib.nullcontext(words))
    model.shares = [[0.4, 0.1, 0.5], [0.7, 0.1, 0.2]]
    some = compared.retention()
    assert some.how == "2 tokens, by 2 of 3 tokens that stand for all"
    first, last = some.described().splitlines()
    assert first == "warning: 2 tokens are too few to judge; give a text of 10,000 or more"
    assert "perplexity" in last
    model.shares = [[0.4, 1.0], [0.7, 0.4]]  # as scored by the model
    assert compared.retention().perplexity == some.perplexity


def test_scores_that_are_not_numbers() -> None:
    model = SavedModel()
    model.shares = [[math.nan, 1.0]] * 2
    assert "are NaN" in Comparison(model, None, None, 1).result()[1].how


@pytest.mark.parametrize(
    ("share", "line"),
    [
        (0.0399, "warning: kept 3% of the BLEU of the original (how): train this model before using it"),
        (math.nan, "warning: kept 0%"),
        (USABLE_SHARE - 1e-6, "warning: kept 84%"),
        (USABLE_SHARE, "kept 85% of the BLEU of the original (how)"),
    ],
)
def test_report_line(share: float, line: str) -> None:
    retention = Retention.measured(share, "BLEU", "how")
    assert retention.described().startswith(line) and "\n" not in retention.described()
    assert retention.needs_training == line.startswith("warning")


@pytest.mark.parametrize(
    ("measure", "before", "after", "share"),
    [
        ("perplexity", 100.0, 125.0, 0.8),
        ("perplexity", 100.0, math.inf, 0.0),
        ("BLEU", 20.0, 18.0, 0.9),
    ],
)
def test_kept_fraction_of_a_quality(measure: str, before: float, after: float, share: float) -> None:
    model = SavedModel(measure, before)
    comparison = Comparison(model, TEXT, None, 5)
    model.measured = Quality(measure, after, "how")
    retention = comparison.result()[1]
    assert retention.share == pytest.approx(share) and retention.needs_training == (share < 0.85)


def test_quality_takes_precedence_over_predictions() -> None:
    model = SavedModel("BLEU", 20.0)
    comparison = Comparison(model, TEXT, None, 5)
    model.measured, model.shares = Quality("BLEU", 5.0, "of a text"), [[0.2, 0.4, 0.4]] * 2
    quality, retention = comparison.result()
    assert quality == QualityReport("BLEU", "of a text", 20.0, 5.0)
    assert (retention.share, retention.of, retention.how, model.asked) == (0.25, "BLEU", "of a text", [])


@pytest.mark.parametrize("validation", [None, TEXT])
def test_predictions_are_compared_without_a_usable_quality(validation: Validation | None) -> None:
    model, texts = SavedModel(), [Path("a")]
    comparison = Comparison(model, validation, texts, 5)
    model.shares = [[0.4, 0.3, 0.3], [0.7, 0.2, 0.1]]
    quality, retention = comparison.result()
    assert model.asked == [(texts, 5)] and (quality is None) == (validation is None)
    assert (
        retention.share == pytest.approx(0.5 / 1.2)
        and retention.needs_training
        and retention.how == "2 tokens"
    )
    assert retention.kl is not None and retention.kl > 0
    assert retention.perplexity is not None
    assert 1.0 + retention.perplexity.change == pytest.approx((0.05 / 0.04) ** 0.5)


def test_models_without_probes_have_no_quality() -> None:
    class Graphs(SavedModel):
        def samples(self, texts: Sequence[Path] | None, seed: int, tokens: int) -> Samples:
            raise ValueError("reads graphs")

    quality, retention = Comparison(Graphs(), None, None, 1).result()
    assert quality is None and retention.share is None and retention.needs_training
    assert retention.described() == (
        "warning: could not verify that this model still works (reads graphs); evaluate it on a text"
    )


def test_sampled_lines(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("a\n\n \nb\n")
    second.write_text("c\nd")
    assert sorted(sampled_lines([first, second], 1)) == ["a", "b", "c", "d"]
    assert sampled_lines([first, second], 1) == sampled_lines([first, second], 1)
    drawn = [sampled_lines([first, second], seed, number=2) for seed in range(400)]
    assert all(len(set(lines)) == 2 for lines in drawn)
    for line in "abcd":  # 200 of 400 are expected, with a standard deviation of 10
        assert 160 < sum(line in lines for lines in drawn) < 240


def content() -> dict[str, Any]:
    """The types of values in checkpoints, and more."""
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


def test_the_digest_depends_on_content_not_layout() -> None:
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
def test_every_change_is_detected(tmp_path: Path, change: Any) -> None:
    stored, file = with_checksum(content()), tmp_path / "model.pt"
    torch.save(stored, file)
    assert verify(file) == verify(tmp_path) == [file]
    change(stored)
    torch.save(stored, file)
    with pytest.raises(UserError, match=f"^{file}: does not match its checksum"):
        verify(tmp_path)


def test_tensors_without_bytes_have_a_digest() -> None:
    odd = {"a": torch.eye(3).to_sparse(), "b": torch.empty(2, device="meta"), "c": Path("x")}
    assert len(state_digest(odd)) == 64


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save({"a": Bomb(tmp_path / "mark")}, file)
    with pytest.raises(UserError, match=f"^checkpoint {file}: cannot be read .* could run code"):
        load_tensors(file, f"checkpoint {file}")
    assert not (tmp_path / "mark").exists()
    for content in (b"", b"text", b"PK\3\4", b"\x80\2}q\0."):
        file.write_bytes(content)
        with pytest.raises(UserError, match="cannot be read"):
            load_tensors(file, "file")
    with pytest.raises(UserError, match="has no file with a checksum"):
        verify(tmp_path / "nothing")


def test_safetensors_carry_their_checksum(tmp_path: Path) -> None:
    path, plain = tmp_path / "own.safetensors", tmp_path / "other.safetensors"
    tensors = {"a": torch.arange(9.0), "b": torch.tensor([1, 2], dtype=torch.uint8)}
    assert save_safetensors(tensors, path) == recorded_checksum(path) == state_digest(tensors)
    from safetensors import safe_open
    from safetensors.torch import save_file

    (tmp_path / "mode").touch()
    save_file(tensors, plain, {"format": "pt", "maker": "another program"})
    assert recorded_checksum(plain) is None
    assert load_tensors(plain, "x")["a"].tolist() == list(range(9))
    stamp_safetensors(plain)
    assert recorded_checksum(plain) == recorded_checksum(path)
    with safe_open(plain, "pt") as opened:
        assert opened.metadata()["maker"] == "another program" and opened.metadata()["format"] == "pt"
    assert verify(tmp_path) == [plain, path]
    assert plain.stat().st_mode == path.stat().st_mode == (tmp_path / "mode").stat().st_mode


def test_every_flipped_byte_of_safetensors_shows(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_safetensors({"a": torch.arange(9.0), "b": torch.tensor([1, 2], dtype=torch.uint8)}, path)
    good = path.read_bytes()
    begin = 8 + int.from_bytes(good[:8], "little")
    for offset in range(begin, len(good)):
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        with pytest.raises(UserError, match="does not match"):
            verify(path)


def test_the_digest_of_one_tensor_follows_its_definition() -> None:
    tensor = torch.tensor([[1.0, 2.0]])
    digest = hashlib.sha256(b"torch.float32 (1, 2) torch.strided" + tensor.numpy().tobytes()).digest()
    parts = [b"mapping of 1", b"str a", digest]
    whole = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts))
    assert state_digest({"a": tensor}) == whole.hexdigest()
