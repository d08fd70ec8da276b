"""Training data and its transforms, those of text to translate, vocabularies, and shares of processes."""

from __future__ import annotations

import contextlib
import gzip
import io
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from nmt.checkpoints import read_checkpoint
from nmt.models import build_from_checkpoint
from nmt.train.training import data_share
from nmt.translation import bleu
from shared_embeddings.cli.main import main
from tests.nmt.conftest import FUNNEL, ErrorLine, Host, Patch, run, weights


@pytest.fixture
def batches(monkeypatch: Patch) -> list[dict[str, Any]]:
    """The batches that trainings of a test use."""
    from onmt.trainer import Trainer

    used: list[dict[str, Any]] = []
    accumulate = Trainer._gradient_accumulation

    def noted(self: Any, true_batches: list[dict[str, Any]], *args: Any) -> Any:
        used.extend(true_batches)
        return accumulate(self, true_batches, *args)

    monkeypatch.setattr(Trainer, "_gradient_accumulation", noted)
    return used


@pytest.mark.parametrize(
    ("lines", "bucket", "passes"), [(600, 600, 2), (600, 262144, 2), (60, 262144, 9), (1, 262144, 3)]
)
def test_each_pair_is_trained_on_once_per_pass(
    lines: int, bucket: int, passes: int, host: Host, batches: list[dict[str, Any]]
) -> None:
    """Also pairs whose source is that of another one, and if a bucket is larger than the corpus."""
    host.write("train.src", [f"w{number % 3}" for number in range(lines)])
    host.write("train.tgt", [f"v{number % 40} v{number % 7}" for number in range(lines)])
    steps = max(1, lines // 20)
    host.train("model", batch_size=20, bucket_size=bucket, train_steps=passes * steps)
    numbers = [
        sorted(number for b in batches[first : first + steps] for number in b["cid_line_number"])
        for first in range(0, passes * steps, steps)
    ]
    assert numbers == [list(range(lines))] * passes


def test_weights_of_corpora_set_the_shares_of_a_bucket(host: Host, batches: list[dict[str, Any]]) -> None:
    """The bucket ends when all of the corpora have been read."""
    small = {"path_src": str(host.write("few.src", ["w1", "w2"]))}
    small["path_tgt"] = str(host.write("few.tgt", ["v1", "v2"]))
    data = {"large": {**host.corpus("train"), "weight": 3}, "small": {**small, "weight": 1}}
    host.train("model", data=data, batch_size=500, bucket_size=500, train_steps=2)
    counts = Counter(zip(batches[0]["cid"], batches[0]["cid_line_number"]))
    assert {counts["large", number] for number in range(90)} == {1}
    assert (
        counts["small", 0] == counts["small", 1] + 1 == 15 or counts["small", 0] == counts["small", 1] == 15
    )


@pytest.mark.parametrize("of_corpus", [True, False], ids=["corpus", "all corpora"])
def test_tags_of_one_side(of_corpus: bool, host: Host, batches: list[dict[str, Any]]) -> None:
    """The other side, whose tag is empty, gets nothing: no word of the vocabulary, no <unk> in batches."""
    tags = {"src_prefix": "｟de｠", "tgt_prefix": "", "src_suffix": "", "tgt_suffix": "｟end｠"}
    transforms = {"transforms": ["prefix", "suffix"], **({} if of_corpus else tags)}
    data = {name: {**host.corpus(name), **(tags if of_corpus else {})} for name in ("train", "valid")}
    (host.folder / "vocab").unlink()
    options = {"data": data, "share_vocab": True, **transforms}
    config = host.config("model", **options, train_steps=30, save_checkpoint_steps=30, bucket_size=90)
    run("onmt_build_vocab -n_sample -1 -config", config, "-save_data", host.folder / "samples")
    counts = dict(line.split("\t") for line in (host.folder / "vocab").read_text().splitlines())
    assert "" not in counts and len(counts) == 82 and counts["｟de｠"] == counts["｟end｠"] == "90"
    run("onmt_train -config", config)
    checkpoint = host.folder / "model_step_30.pt"
    words = read_checkpoint(checkpoint)["vocab"]["src"]
    assert "" not in words
    texts = {
        side: [
            [words[word] for word in row if words[word] != "<blank>"]
            for b in batches[:6]
            for row in b[side][..., 0]
        ]
        for side in ("src", "tgt")
    }
    lines = {side: (host.folder / f"train.{side}").read_text().splitlines() for side in ("src", "tgt")}
    assert sorted(texts["src"]) == sorted(["｟de｠", *line.split()] for line in lines["src"])
    assert sorted(texts["tgt"]) == sorted(["<s>", *line.split(), "｟end｠", "</s>"] for line in lines["tgt"])
    tagged = host.write(
        "tagged", [f"｟de｠ {line}" for line in (host.folder / "test.src").read_text().splitlines()]
    )
    by_hand = host.translate(checkpoint, "-transforms", "none", source=tagged.name)
    assert any(line.endswith(" ｟end｠") for line in by_hand)
    assert host.translate(checkpoint) == [line.removesuffix("｟end｠").rstrip(" ") for line in by_hand]


def test_vocabularies_have_all_words_of_their_files(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """Unless they are limited, which is reported."""
    words = host.write("many", [f"w{number}\t{50000 - number}" for number in range(40000)])
    whole = host.train("whole", src_vocab=str(words), train_steps=1)
    assert len(read_checkpoint(whole)["vocab"]["src"]) == 40008  # 4 special tokens, and a multiple of 8
    assert "src_vocab_size" not in caplog.text
    limited = host.train("limited", src_vocab=str(words), src_vocab_size=3000, train_steps=1)
    assert read_checkpoint(limited)["vocab"]["src"][4:] == [f"w{number}" for number in range(2996)]
    assert "src_vocab_size: 3,000" in caplog.text and "2,996 of the 40,000 words" in caplog.text


@pytest.mark.slow_except("configuration-*")
@pytest.mark.parametrize(
    ("options", "source", "target"),
    [
        ({"src_vocab_size": 6, "tgt_vocab_size": 5}, "ab", "v"),
        ({"src_words_min_frequency": 2, "tgt_words_min_frequency": 4}, "abc", "v"),
        ({"src_vocab_size": 7, "src_words_min_frequency": 3}, "ab", "vw"),
        ({"vocab_size_multiple": 5}, "abcd", "vw"),
    ],
    ids=str,
)
@pytest.mark.parametrize("in_file", [True, False], ids=["configuration", "command line"])
def test_limits_of_built_vocabularies(
    in_file: bool,
    options: dict[str, int],
    source: str,
    target: str,
    host: Host,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Training with the same options uses them whole."""
    host.write("train.src", ["a b c d", "a b c", "a b", "a"])
    host.write("train.tgt", ["v w", "v w", "v", "v"])
    files = {f"{side}_vocab": str(host.folder / f"{side}.vocab") for side in ("src", "tgt")}
    untied = {"share_vocab": False, "share_embeddings": False, "train_steps": 1, "vocab_size_multiple": 1}
    config = host.config("model", **{**untied, **files, **(options if in_file else {})})
    arguments = () if in_file else [word for name, value in options.items() for word in (f"-{name}", value)]
    run("onmt_build_vocab -n_sample -1 -config", config, "-save_data", host.folder / "samples", *arguments)
    checkpoint = host.train("model", **{**untied, **files, **options})
    unused = 2 if "vocab_size_multiple" in options else 0
    for side, words, added in (("src", source, unused), ("tgt", target, 2 * unused)):
        entries = Path(files[f"{side}_vocab"]).read_text().splitlines()
        wanted = [
            f"{word}\t{count}" for word, count in zip(words, {"src": (4, 3, 2, 1), "tgt": (4, 2)}[side])
        ]
        assert entries[: len(words)] == wanted
        assert entries[len(words) :] == [f"averyunlikelytoken{number}\t0" for number in range(added)]
        assert len(read_checkpoint(checkpoint)["vocab"][side]) == 4 + len(words) + added
    assert f"words of {files['src_vocab']}" not in caplog.text


def test_only_a_shared_configuration_may_have_options_of_training(host: Host, error_line: ErrorLine) -> None:
    config = host.config("model", src_vocab=str(host.folder / "new"))
    usual = ("-n_sample", -1, "-config", config, "-save_data", host.folder / "samples")
    assert "train_steps" in error_line("onmt_build_vocab -train_steps 5", *usual)
    run("onmt_build_vocab", *usual)


def test_compressed_texts_are_read_like_others(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    options = {"valid_steps": 3, "valid_metrics": ["BLEU"], "train_steps": 3}
    plain = host.train("plain", **options)
    wanted, scores = host.translate(plain, "-tgt", host.folder / "test.tgt"), caplog.text.count("BLEU: ")
    built = ("-n_sample", -1, "-save_data", host.folder / "samples", "-overwrite")
    run("onmt_build_vocab -config", host.config("plain", src_vocab=str(host.folder / "built")), *built)
    data = {}
    for split in ("train", "valid", "test"):
        data[split] = {name: f"{path}.gz" for name, path in host.corpus(split).items() if name != "weight"}
        for compressed in map(Path, data[split].values()):
            compressed.write_bytes(gzip.compress(compressed.with_suffix("").read_bytes()))
            compressed.with_suffix("").unlink()
    del data["test"]
    packed = host.train("packed", data=data, **options)
    for name, tensor in weights(packed).items():
        assert torch.equal(tensor, weights(plain)[name])
    assert caplog.text.count("BLEU: ") == 2 * scores > 0
    assert host.translate(packed, "-tgt", host.folder / "test.tgt.gz", source="test.src.gz") == wanted
    run(
        "onmt_build_vocab -config",
        host.config("packed", data=data, src_vocab=str(host.folder / "again")),
        *built,
    )
    assert (host.folder / "again").read_bytes() == (host.folder / "built").read_bytes()


class Subwords:
    """A model trained with BPE as a transform, and what it needs."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.codes = host.folder / "codes"
        texts = [(host.folder / f"train.{side}").read_text(encoding="utf-8") for side in ("src", "tgt")]
        with self.codes.open("w", encoding="utf-8") as file, contextlib.redirect_stderr(io.StringIO()):
            learn_bpe(io.StringIO("".join(texts)), file, 12)
        with self.codes.open(encoding="utf-8") as file:
            self.bpe = BPE(file)
        pieces = {piece for text in texts for line in text.splitlines() for piece in self.split(line).split()}
        host.write("pieces", [f"{piece}\t9" for piece in sorted(pieces)])

    def split(self, line: str) -> str:
        """A line in subwords."""
        return str(self.bpe.process_line(line))

    def train(self, name: str = "model", **more: Any) -> Path:
        """Train it on plain text."""
        files = {"src_subword_model": str(self.codes), "src_vocab": str(self.host.folder / "pieces")}
        usual = {"embedding": FUNNEL, "transforms": ["bpe", "filtertoolong"], "train_steps": 3, **files}
        return self.host.train(name, **{**usual, **more})

    def by_hand(self, checkpoint: Path, *arguments: object, prefix: str = "") -> list[str]:
        """The translation of the test set from tokens, split and joined without OpenNMT."""
        lines = (self.host.folder / "test.src").read_text(encoding="utf-8").splitlines()
        self.host.write("tokens", [self.split(f"{prefix}{line}") for line in lines])
        translated = self.host.translate(checkpoint, "-transforms", "none", *arguments, source="tokens")
        return [f"{line} ".replace("@@ ", "").rstrip(" ") for line in translated]


@pytest.fixture(scope="module")
def subwords(tmp_path_factory: pytest.TempPathFactory) -> Subwords:
    """A folder with codes and a vocabulary of subwords."""
    return Subwords(Host(tmp_path_factory.mktemp("host")))


@pytest.fixture(scope="module")
def model(subwords: Subwords) -> Path:
    """A model trained with BPE as a transform."""
    return subwords.train()


def test_plain_text_is_translated_like_its_tokens(
    subwords: Subwords, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = subwords.by_hand(model)
    assert "transforms: none: the text is tokenized" in caplog.text
    assert subwords.host.translate(model) == wanted
    assert "transforms: bpe on the source" in caplog.text
    codes = ("-src_subword_model", str(subwords.codes), "-tgt_subword_model", str(subwords.codes))
    assert subwords.host.translate(model, "-transforms", "bpe", *codes) == wanted
    assert subwords.host.translate(model, "-n_best", "2", "-with_score")[0].split("\t")[0] == wanted[0]


def test_a_model_without_transforms_takes_tokenized_text(host: Host) -> None:
    checkpoint = host.train("model", train_steps=1)
    as_it_is = host.translate(checkpoint)
    assert host.translate(checkpoint, "-transforms", "none") == as_it_is
    assert "subwords" not in read_checkpoint(checkpoint)


@pytest.mark.usefixtures("installed_host")
def test_bpe_codes_are_stored_in_the_checkpoint(
    subwords: Subwords, model: Path, tmp_path: Path, error_line: ErrorLine
) -> None:
    """Also after averaging, release and compression; otherwise they are searched, and reported if missing."""
    wanted = subwords.host.translate(model)
    mean, released, small = tmp_path / "mean.pt", tmp_path / "released.pt", tmp_path / "small.pt"
    run("onmt_average_models -models", model, "-output", mean)
    run("onmt_release_model -model", mean, "-output", released)
    asked = ["compress", "--model", model, "--method", "projective", "--rank", 16, "--output", small]
    assert main([str(word) for word in asked]) == 0
    assert torch.equal(*(read_checkpoint(path)["subwords"]["src_subword_model"] for path in (model, small)))
    away = subwords.codes.rename(tmp_path / "codes.away")
    try:
        for checkpoint in (model, mean, released):
            assert subwords.host.translate(checkpoint) == wanted
        saved = read_checkpoint(released)
        del saved["subwords"]
        bare = tmp_path / "bare.pt"
        torch.save(saved, bare)
        asked = ("-model", str(bare), "-src", str(subwords.host.folder / "test.src"))
        line = error_line("onmt_translate", *asked, "-output", tmp_path / "out")
        assert "src_subword_model" in line and str(subwords.codes) in line and "-transforms none" in line
        (tmp_path / "codes").write_bytes(away.read_bytes())  # beside the checkpoint
        assert subwords.host.translate(bare) == wanted
    finally:
        away.rename(subwords.codes)
    (tmp_path / "codes").unlink()
    assert subwords.host.translate(bare) == wanted  # at their path in training


def test_a_run_records_its_own_transforms(subwords: Subwords, tmp_path: Path) -> None:
    """Not those of the checkpoint that it trains from, whose codes may have been moved."""
    options = {"transforms": None, "src_vocab": str(subwords.host.folder / "pieces"), "train_steps": 1}
    without = subwords.host.train("without", embedding=FUNNEL, **options)
    assert "subwords" not in read_checkpoint(without)
    tuned = subwords.train("tuned", train_from=str(without), reset_optim="all", train_steps=1)
    assert subwords.host.translate(tuned) == subwords.by_hand(tuned)
    moved = tmp_path / "moved"
    moved.write_bytes(subwords.codes.read_bytes())
    first = subwords.train("resumed", train_steps=1)
    away = subwords.codes.rename(tmp_path / "codes.away")
    try:
        resumed = subwords.train("resumed", train_steps=2, src_subword_model=str(moved))
        assert resumed != first and subwords.host.translate(resumed)
    finally:
        away.rename(subwords.codes)


def test_lines_emptied_by_transforms_keep_their_position(host: Host) -> None:
    checkpoint = host.train("model", transforms=["normalize"], train_steps=1)
    host.write("odd", ["w1 w2", "\u200b", "w3"])
    lines = host.translate(checkpoint, "-post_remove_control_chars", "true", "-min_length", "1", source="odd")
    assert len(lines) == 3


def test_prefixes_of_a_corpus(subwords: Subwords, error_line: ErrorLine, tmp_path: Path) -> None:
    """A single prefix is added and removed automatically; with several, the text must contain one."""
    host, data = subwords.host, {}
    for name, mark in (("one", "w1"), ("two", "w2")):
        data[name] = {**host.corpus("train"), "transforms": ["prefix", "bpe"], "src_prefix": mark}
    alone = subwords.train("alone", data={"one": {**data["one"], "tgt_prefix": "v7"}})
    begun = host.write("begun", [subwords.split("v7")] * 7)
    joined = subwords.by_hand(alone, "-tgt", begun, "-tgt_file_prefix", prefix="w1 ")
    assert all(line.split()[0] == "v7" for line in joined)
    assert host.translate(alone) == [line.removeprefix("v7").removeprefix(" ") for line in joined]
    assert host.translate(alone, "-transforms", "bpe") == subwords.by_hand(alone)
    several = subwords.train("several", data=data)
    files = ("-src", host.folder / "test.src", "-output", tmp_path / "out")
    line = error_line("onmt_translate -model", several, *files)
    assert "w1" in line and "w2" in line and "-transforms" in line
    arguments = ("-transforms", "prefix", "bpe", "-src_prefix", "w2")
    assert host.translate(several, *arguments) == subwords.by_hand(several, prefix="w2 ")


def test_models_of_an_ensemble_have_the_same_transforms(
    subwords: Subwords, model: Path, error_line: ErrorLine
) -> None:
    files = ("-src", subwords.host.folder / "test.src", "-output", subwords.host.folder / "out")
    other = subwords.train("plain", transforms=None, train_steps=1)
    line = error_line("onmt_translate -model", model, other, *files)
    assert f"{other} was trained with other transforms" in line and "-transforms none" in line
    assert len(subwords.by_hand(model)) == len(subwords.host.translate([model, other], "-transforms", "none"))


def test_sentencepiece_and_pyonmttok_are_undone(subwords: Subwords, tmp_path: Path) -> None:
    """Like these libraries join tokens; with a shared vocabulary, the target uses the source's options."""
    pyonmttok, sentencepiece = pytest.importorskip("pyonmttok"), pytest.importorskip("sentencepiece")
    host, prefix = subwords.host, str(tmp_path / "pieces")
    texts = [str(host.folder / f"train.{side}") for side in ("src", "tgt")]
    with contextlib.redirect_stderr(io.StringIO()):
        sentencepiece.SentencePieceTrainer.train(
            input=texts, model_prefix=prefix, vocab_size=40, minloglevel=2, hard_vocab_limit=False
        )
    pieces = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    joining = {"mode": "space", "joiner_annotate": True}
    tokenizer = pyonmttok.Tokenizer(bpe_model_path=str(subwords.codes), **joining)
    kinds: list[tuple[dict[str, Any], Callable[[str], list[str]], Callable[[list[str]], str]]] = [
        (
            {"transforms": ["sentencepiece"], "src_subword_model": f"{prefix}.model"},
            lambda line: list(pieces.encode(line, out_type=str)),
            lambda tokens: str(pieces.decode(tokens)),
        ),
        (
            {"transforms": ["onmt_tokenize"], "src_subword_type": "bpe", "src_onmttok_kwargs": str(joining)},
            lambda line: list(tokenizer(line)),
            lambda tokens: str(tokenizer.detokenize(tokens)),
        ),
    ]
    lines = (host.folder / "test.src").read_text(encoding="utf-8").splitlines()
    for number, (options, split, join) in enumerate(kinds):
        words = {
            piece for text in texts for line in Path(text).read_text().splitlines() for piece in split(line)
        }
        vocabulary = host.write(f"words{number}", [f"{word}\t9" for word in sorted(words)])
        checkpoint = subwords.train(f"kind{number}", src_vocab=str(vocabulary), **options)
        host.write("tokens", [" ".join(split(line)) for line in lines])
        by_hand = host.translate(checkpoint, "-transforms", "none", source="tokens")
        assert host.translate(checkpoint) == [join(line.split()) for line in by_hand]


@pytest.mark.usefixtures("installed_host")
def test_compression_does_not_apply_transforms(subwords: Subwords, model: Path, tmp_path: Path) -> None:
    """Its BLEU is that of the command on the tokens of a text."""
    host = subwords.host
    source = (host.folder / "test.src").read_text(encoding="utf-8").splitlines()
    tokens = host.write("tokens", [subwords.split(line) for line in source])
    usual = ["-transforms", "none", "-beam_size", "5", "-max_length", "250", "-max_length_ratio", "1.25"]
    translated = host.translate(model, *usual, source="tokens")
    lines = [f"{line} v1 v2" for line in translated]
    wanted = sacrebleu.corpus_bleu(translated, [lines], tokenize="none", force=True).score
    measured = bleu(model, build_from_checkpoint(str(model))[0], tokens, host.write("wanted", lines))
    assert measured.value == pytest.approx(wanted) and wanted > 0


def machine(ranks: list[int], world_size: int, mode: str = "data_parallel") -> list[tuple[int, int]]:
    """The shares of the processes of one machine."""
    opt = Namespace(gpu_ranks=ranks, world_size=world_size, parallel_mode=mode)
    return [data_share(opt, device_id) for device_id in (range(len(ranks)) if ranks else [-1])]


def test_processes_read_different_lines() -> None:
    """Also those of two machines; only with tensor parallelism, all read everything."""
    assert machine([0, 1, 2], 3) == [(0, 3), (1, 3), (2, 3)]
    assert machine([0, 1], 4) + machine([2, 3], 4) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert machine([0, 1], 2, mode="tensor_parallel") == [(0, 1), (0, 1)]
    assert machine([0], 1) == machine([], 1) == [(0, 1)]
