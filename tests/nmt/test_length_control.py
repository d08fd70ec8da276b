"""Length control through OpenNMT's commands: a model that generates the requested number of words."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from onmt.modules.embeddings import PositionalEncoding
from onmt.translate.translation_server import ServerModel
from torch import Tensor

from nmt.checkpoints import read_checkpoint, save_checkpoint
from nmt.embeddings import shared_embeddings_of
from nmt.hooks import apply_patches
from nmt.length_control import LengthControlledPositions, positions_of
from nmt.models import build_from_checkpoint
from shared_embeddings.compress.command import compress
from shared_embeddings.compress.options import CompressOptions
from shared_embeddings.utils.errors import UserError
from tests.nmt.conftest import WORDS, ErrorLine, Host, Trained, run

ALONE = {"method": "alone", "base_dim": 16, "hidden_dim": 32, "codebooks": 4, "codebook_size": 8}
COUNTING: dict[str, Any] = {
    "embedding": ALONE,
    "decoder_positions": ["ldpe"],
    "hidden_size": 32,
    "word_vec_size": 32,
    "learning_rate": 0.005,
    "dropout": [0.0],
    "alignment_layer": -1,
    "valid_steps": 50,
    "report_every": 50,
}


def counting_host(folder: Path) -> Host:
    """A corpus of random words to repeated ``v1``, whose number does not depend on the source."""
    host = Host(folder)
    generator = random.Random(3)
    for split, size in (("train", 120), ("valid", 10)):
        lengths = [generator.randint(1, 7) for _ in range(size)]
        host.write(f"{split}.src", [" ".join(generator.choices(sorted(WORDS), k=3)) for _ in lengths])
        host.write(f"{split}.tgt", [" ".join(["v1"] * length) for length in lengths])
    host.write("test.src", ["w1", "w2 w3", "", "w1", "w2 w3", "w1"])
    host.write("lengths", ["4", "2", "9", "6", "1", "3"])
    return host


WANTED = [4, 2, 0, 6, 1, 3]


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Host, Path]:
    """A trained model of ALONE whose decoder has the length difference."""
    host = counting_host(tmp_path_factory.mktemp("counting"))
    checkpoint = host.train("model", **COUNTING, train_steps=200, save_checkpoint_steps=50)
    return host, checkpoint


def sizes(lines: list[str]) -> list[int]:
    return [len(line.split()) for line in lines]


# Positions


INTERLEAVED, CONCATENATED = "SinusoidalInterleaved", "SinusoidalConcat"

# Position 2 of an output of length 9, D = 4: the exponents 2i/D are 0 and 1/2.
BY_HAND = {
    "pe": [0.9092974268, -0.4161468365, 0.0199986667, 0.9998000067],  # 2/1, 2/100
    "ldpe": [0.6569865987, 0.7539022543, 0.0699428473, 0.9975510003],  # 7/1, 7/100
    "lrpe": [0.9092974268, -0.4161468365, 0.6183698031, 0.7858872608],  # 2/1, 2/3
}
# The same where sines come first and the exponents i/(D/2 - 1) are 0 and 1.
BY_HAND_CONCATENATED = {
    "pe": [0.9092974268, 0.0002000000, -0.4161468365, 0.9999999800],  # 2/1, 2/10000
    "ldpe": [0.6569865987, 0.0006999999, 0.7539022543, 0.9999997550],  # 7/1, 7/10000
    "lrpe": [0.9092974268, 0.2203977435, -0.4161468365, 0.9754100854],  # 2/1, 2/9
}


def added(
    encodings: list[str], lengths: list[int], size: int, dim: int = 4, layout: str = INTERLEAVED
) -> Tensor:
    """The encodings of positions 0 to ``size`` - 1, added to embeddings of 0."""
    positions = LengthControlledPositions(dim, encodings, layout)
    positions.set_lengths(torch.tensor(lengths))
    return positions(torch.zeros(len(lengths), size, dim))


@pytest.mark.parametrize("name", BY_HAND)
def test_values_by_hand(name: str) -> None:
    torch.testing.assert_close(added([name], [9], 3)[0, 2], torch.tensor(BY_HAND[name]))
    encoded = added([name], [9], 3, layout=CONCATENATED)[0, 2]
    torch.testing.assert_close(encoded, torch.tensor(BY_HAND_CONCATENATED[name]))


def test_encodings_are_summed_and_embeddings_scaled() -> None:
    positions = LengthControlledPositions(4, ["pe", "lrpe"], INTERLEAVED)
    positions.set_lengths(torch.tensor([9]))
    encoded = positions(torch.ones(1, 3, 4))[0, 2]
    wanted = [2 + pe + lrpe for pe, lrpe in zip(BY_HAND["pe"], BY_HAND["lrpe"], strict=True)]  # sqrt(4) = 2
    torch.testing.assert_close(encoded, torch.tensor(wanted))


@pytest.mark.parametrize("layout", [INTERLEAVED, CONCATENATED])
def test_sinusoids_equal_upstream(layout: str) -> None:
    emb = torch.randn(2, 30, 16, generator=torch.Generator().manual_seed(1))
    positions = LengthControlledPositions(16, ["pe"], layout)
    positions.set_lengths(torch.tensor([3, 4]))
    torch.testing.assert_close(positions(emb), PositionalEncoding(16, layout)(emb), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("encodings", [["ldpe"], ["lrpe"], ["pe", "ldpe"], ["pe", "ldpe", "lrpe"]])
def test_stepwise_positions_equal_those_of_a_sequence(encodings: list[str]) -> None:
    positions = LengthControlledPositions(8, encodings, INTERLEAVED)
    positions.set_lengths(torch.tensor([2, 40]))
    emb = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    steps = [positions(emb[:, step : step + 1], step=step) for step in range(6)]
    torch.testing.assert_close(torch.cat(steps, dim=1), positions(emb))


def test_difference_encoding_depends_on_the_remaining_length() -> None:
    short, long = added(["ldpe"], [3, 8], 9)
    torch.testing.assert_close(short[0:4], long[5:9])
    torch.testing.assert_close(short[3], torch.tensor([0.0, 1.0, 0.0, 1.0]))  # the desired end: sin 0, cos 0
    assert torch.isfinite(added(["ldpe", "lrpe"], [1], 5)).all()


def test_input_dtype_is_kept() -> None:
    positions = LengthControlledPositions(4, ["pe", "lrpe"], INTERLEAVED)
    positions.set_lengths(torch.tensor([300]))
    exact, coarse = (
        positions(torch.zeros(1, 301, 4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)
    )
    assert coarse.dtype == torch.bfloat16
    torch.testing.assert_close(coarse, exact.bfloat16())  # angles of 300 do not fit into 8 bits


# Outputs


@pytest.mark.slow
def test_translations_have_the_desired_lengths(counting: tuple[Host, Path]) -> None:
    host, checkpoint = counting
    lines = host.translate(checkpoint, "-desired_lengths", host.folder / "lengths")
    assert sizes(lines) == WANTED
    assert sizes(host.translate(checkpoint, "-desired_length", "5")) == [5, 5, 0, 5, 5, 5]


@pytest.mark.slow_except("small batches")
@pytest.mark.parametrize(
    "options",
    [
        ("-beam_size", "1"),
        ("-beam_size", "3", "-n_best", "3", "-with_score"),
        ("-beam_size", "1", "-random_sampling_topk", "1"),
        ("-beam_size", "2", "-report_align"),
        ("-batch_size", "2"),
    ],
    ids=["greedy", "n_best", "sampling", "alignments", "small batches"],
)
def test_batches_equal_single_lines(counting: tuple[Host, Path], options: tuple[str, ...]) -> None:
    """Hypotheses of a batch end at different steps, so lengths must follow the remaining beams."""
    host, checkpoint = counting
    together = host.translate(checkpoint, "-desired_lengths", host.folder / "lengths", *options)
    alone = []
    for text, length in zip(["w1", "w2 w3", "w1", "w2 w3", "w1"], [4, 2, 6, 1, 3], strict=True):
        host.write("one", [text])
        alone += host.translate(checkpoint, "-desired_length", length, *options, source="one")
    filled = [line for line in together if line.split("\t")[0]]
    assert [line.split("\t")[0] for line in filled] == [line.split("\t")[0] for line in alone]
    if "-with_score" in options:
        scores = [[float(line.split("\t")[1]) for line in lines] for lines in (filled, alone)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)
        assert len(filled) == 15


def test_predictions_are_compared_when_it_is_compressed(counting: tuple[Host, Path]) -> None:
    host, checkpoint = counting
    options = CompressOptions(model=checkpoint, output=host.folder / "small.pt", method="quantized")
    kept = compress(options, bits=8).report.kept
    assert kept.share is not None and kept.share > 0.9, kept.how


def test_length_needs_no_ratio_to_the_source(counting: tuple[Host, Path]) -> None:
    """Upstream's default ratio to the words of the source would end the search after 6 words."""
    host, checkpoint = counting
    host.write("one", ["w1"])
    output = host.folder / "free"
    arguments = ("-src", str(host.folder / "one"), "-output", str(output), "-min_length", "30")
    run("onmt_translate -model", checkpoint, *arguments, "-desired_length", "30")
    assert sizes(output.read_text().splitlines())[0] >= 30


def test_gold_scores(counting: tuple[Host, Path]) -> None:
    """Targets are scored with the desired length, whatever their own length."""
    host, checkpoint = counting
    host.write("gold", ["v1 v1", "v1 v1", "", "v1 v1 v1", "v1", "v1"])
    lines = host.translate(checkpoint, "-desired_length", "2", "-tgt", host.folder / "gold")
    assert sizes(lines) == [2, 2, 0, 2, 2, 2]


# The decoder


def rows(host: Host, checkpoint: Path) -> tuple[Any, Any, Any, Any]:
    """A model and a batch of two sources ``(2, S, 1)`` with targets ``(2, T, 1)`` of 2 and 4 words."""
    model: Any
    model, vocabs, *_ = build_from_checkpoint(str(checkpoint))
    source = [vocabs["src"](["w1", "w1"]), vocabs["src"](["w2", "w3"])]
    start, word, end, blank = vocabs["tgt"](["<s>", "v1", "</s>", "<blank>"])
    target = [[start, word, word, end, blank, blank], [start, word, word, word, word, end]]
    return model, torch.tensor(source)[:, :, None], torch.tensor(target)[:, :, None], torch.tensor([2, 2])


def test_training_uses_the_lengths_of_the_targets(counting: tuple[Host, Path]) -> None:
    model, source, target, lengths = rows(*counting)
    model(source, target, lengths)
    assert positions_of(model)[0].lengths.tolist() == [2, 4]  # type: ignore[union-attr]


@torch.no_grad()
def test_steps_equal_teacher_forcing(counting: tuple[Host, Path]) -> None:
    model, source, target, lengths = rows(*counting)
    whole, _ = model(source, target, lengths)
    positions_of(model)[0].set_lengths(torch.tensor([2, 4]))
    encoded, final, _ = model.encoder(source, lengths)
    model.decoder.init_state(source, encoded, final)
    for step in range(target.size(1) - 1):
        state, _ = model.decoder(target[:, step : step + 1], encoded, src_len=lengths, step=step)
        real = target[:, step, 0] != model.decoder.embeddings.word_padding_idx
        torch.testing.assert_close(state[real, 0], whole[real, step], atol=1e-5, rtol=1e-5)
    positions_of(model)[0].set_lengths(torch.tensor([3, 4]))
    model.decoder.init_state(source, encoded, final)
    state, _ = model.decoder(target[:, :1], encoded, src_len=lengths, step=0)
    assert not torch.allclose(state[0, 0], whole[0, 0], atol=1e-3)
    torch.testing.assert_close(state[1, 0], whole[1, 0], atol=1e-5, rtol=1e-5)


def test_encoder_keeps_its_own_positions(counting: tuple[Host, Path]) -> None:
    model: Any = build_from_checkpoint(str(counting[1]))[0]
    assert isinstance(model.encoder.embeddings.make_embedding.pe, PositionalEncoding)
    assert isinstance(model.decoder.embeddings.make_embedding.pe, LengthControlledPositions)
    assert [embedding.method for embedding in shared_embeddings_of(model)] == ["alone"]


# Checkpoints


def test_checkpoints_resume_average_and_release(counting: tuple[Host, Path]) -> None:
    host, checkpoint = counting
    first = host.folder / "model_step_50.pt"
    more = ("-train_from", str(checkpoint))
    longer = host.train("longer", *more, **COUNTING, train_steps=202, save_checkpoint_steps=202)
    average, released = host.folder / "average.pt", host.folder / "released.pt"
    run("onmt_average_models -models", checkpoint, longer, "-output", average)
    run("onmt_release_model -model", checkpoint, "-output", released)
    for path in (longer, average, released):
        assert sizes(host.translate(path, "-desired_length", "4"))[:2] == [4, 4], path
    both = host.translate([checkpoint, first], "-desired_lengths", host.folder / "lengths")
    assert sizes(both)[2] == 0 and all(size for number, size in enumerate(sizes(both)) if number != 2)


@pytest.mark.parametrize(
    ("positions", "embedding", "layout"),
    [
        (["lrpe"], {"method": "funnel", "rank": 4}, "SinusoidalConcat"),
        (["pe", "lrpe"], None, "SinusoidalInterleaved"),
        (["ldpe", "lrpe"], {"method": "standard"}, "SinusoidalInterleaved"),
    ],
)
def test_every_table_trains_and_translates(
    tmp_path: Path, positions: list[str], embedding: dict[str, Any] | None, layout: str
) -> None:
    host = counting_host(tmp_path)
    options = {"decoder_positions": positions, "position_encoding_type": layout}
    checkpoint = host.train("model", embedding=embedding, **options, train_steps=2, save_checkpoint_steps=2)
    assert read_checkpoint(checkpoint)["opt"].decoder_positions == positions
    lines = host.translate(checkpoint, "-desired_length", "3", "-min_length", "1")
    assert [bool(line) for line in lines] == [True, True, False, True, True, True]


def test_server(counting: tuple[Host, Path]) -> None:
    host, checkpoint = counting
    apply_patches()

    def answer(**options: Any) -> str:
        settings = {"models": [str(checkpoint)], "gpu": -1, "beam_size": 2, **options}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["onmt_server"])
            model = ServerModel(settings, 100, load=True, model_root="")
        return str(model.run([{"src": "w1"}])[0][0])

    assert answer(desired_length=3) == "v1 v1 v1"
    with pytest.raises(UserError, match="desired_length: is not set"):
        answer()
    with pytest.raises(UserError, match="server"):
        answer(desired_lengths=str(host.folder / "lengths"))


# Errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decoder_positions": ["pe", "lpe"]}, "decoder_positions lpe lrpe"),
        ({"decoder_positions": ["pe"], "position_encoding": False}, "decoder_positions position_encoding"),
        ({"decoder_positions": ["ldpe"], "decoder_type": "rnn", "encoder_type": "brnn"}, "rnn transformer"),
    ],
)
def test_training_rejects_invalid_options(
    host: Host, error_line: ErrorLine, options: dict[str, Any], words: str
) -> None:
    line = error_line("onmt_train -config", host.config("model", embedding=ALONE, **options))
    assert all(word in line for word in words.split()), line


def test_training_resumes_only_with_the_same_positions(
    counting: tuple[Host, Path], error_line: ErrorLine
) -> None:
    host, checkpoint = counting
    config = host.config("other", embedding=ALONE, decoder_positions=["pe", "lrpe"], train_steps=140)
    line = error_line("onmt_train -config", config, "-train_from", checkpoint)
    assert "decoder_positions: ['pe', 'lrpe'] has no effect with train_from" in line and "['ldpe'];" in line


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ("4 2 9 6 1", "5 lengths, but the source has 6"),
        ("4 2 9 6 1 0", "line 6: '0'"),
        ("4 2 9 6 1 9", "max_length: 9 is too small"),
    ],
)
def test_lengths_files_fail(
    counting: tuple[Host, Path], error_line: ErrorLine, lengths: str, words: str
) -> None:
    path = counting[0].write("broken", lengths.split())
    assert words in error_line(*translation(*counting), "-desired_lengths", path, "-max_length", "9")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "desired_length: is not set"),
        ("-desired_length 0", "'0'"),
        ("-desired_length 250", "max_length: 250 is too small for the desired_length; set 251"),
        ("-desired_length 9 -desired_lengths /dev/null", "not allowed with argument --desired_length"),
        ("-desired_lengths /nowhere", "/nowhere"),
    ],
)
def test_translation_rejects_invalid_options(
    counting: tuple[Host, Path], error_line: ErrorLine, arguments: str, words: str
) -> None:
    assert words in error_line(*translation(*counting), *arguments.split())


def translation(host: Host, checkpoint: Path) -> tuple[Any, ...]:
    """A command that translates."""
    files = ("-src", host.folder / "test.src", "-output", host.folder / "out")
    return "onmt_translate -model", checkpoint, *files


# Without the options


def test_other_models_are_unchanged(trained: Trained, error_line: ErrorLine, tmp_path: Path) -> None:
    host, checkpoint = trained(embedding=ALONE)
    model: Any = build_from_checkpoint(str(checkpoint))[0]
    assert not positions_of(model)
    assert isinstance(model.decoder.embeddings.make_embedding.pe, PositionalEncoding)
    line = error_line(*translation(host, checkpoint), "-desired_length", "5")
    assert "desired_length: has no effect" in line and "decoder_positions" in line
    older = read_checkpoint(checkpoint)
    del older["opt"].decoder_positions
    save_checkpoint(older, tmp_path / "older.pt")
    assert host.translate(tmp_path / "older.pt") == host.translate(checkpoint)


def test_sinusoids_by_name_are_the_default(trained: Trained) -> None:
    named, plain = (
        read_checkpoint(trained(embedding=ALONE, **options)[1])
        for options in ({"decoder_positions": ["pe"]}, {})
    )
    assert named["model"].keys() == plain["model"].keys()
    for name, tensor in named["model"].items():
        torch.testing.assert_close(tensor, plain["model"][name], rtol=0, atol=0)
