"""The Multi30k recipe on a few sentences, from raw files to a vocabulary."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import shared_embeddings as se
from lm.data import datasets
from recipes.common.recipe import find_recipe
from recipes.common.results import SEED, read_results
from recipes.common.table import records_of
from recipes.common.tools import run_main
from recipes.translation import preprocess
from recipes.translation.subwords import Tokenizer, join_bpe, joiner
from recipes.translation.train import AVERAGED, complete_row
from shared_embeddings.utils.files import sha256
from tests.helpers import times_fewer

RECIPE = find_recipe("multi30k_ende")
PAIRS = [
    ("Two young men are outside.", "Zwei junge Männer sind im Freien."),
    ('A girl in a T-shirt says "yes" (twice).', 'Ein Mädchen im T-Shirt sagt "ja" (zweimal).'),
    ("A  dog & a cat at McDonald's.", "Ein Hund & eine Katze bei McDonald's."),
    ("The men are young.", "Die Männer sind jung."),
    ("Two dogs are outside, waiting...", "Zwei Hunde sind im Freien und warten..."),
]
FILES = [f"{split}.{side}.gz" for split in ("train", "val", "test_2016_flickr") for side in ("en", "de")]


class SmallCorpus:
    """A small corpus in Multi30k's format, with its own settings and an empty folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.raw, self.runs, self.settings = folder / "multi30k", folder / "runs", folder / "data.yaml"
        self.data = self.runs / "multi30k_ende" / "data"
        self.raw.mkdir()
        for name in FILES:
            lines = [pair["de" in name] for pair in PAIRS]
            self.write(name, "".join(f"{line}\n" for line in lines))
        self.configure()

    def write(self, name: str, text: str) -> None:
        (self.raw / name).write_bytes(gzip.compress(text.encode(), mtime=0))

    def configure(self, **changes: Any) -> None:
        _, settings = RECIPE.data_settings()
        del settings["pieces"]
        checksums = {path.name: sha256(path) for path in self.raw.iterdir()}
        settings |= {"bpe_operations": 40, "num_classes": 3, "sha256": checksums, **changes}
        self.settings.write_text(yaml.safe_dump(settings, sort_keys=False))

    def prepare(self) -> int:
        return run_main(
            "preprocess", partial(preprocess.prepare_multi30k, RECIPE), ["--settings", str(self.settings)]
        )


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallCorpus:
    made = SmallCorpus(tmp_path)
    monkeypatch.setenv("RUNS", str(made.runs))
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    return made


def test_preprocessing_from_end_to_end(small: SmallCorpus) -> None:
    assert small.prepare() == 0
    description = json.loads((small.data / "data.json").read_text())
    assert description["pairs"] == {"train": 5, "valid": 5, "test": 5}
    vocabulary = [line.split("\t") for line in (small.data / "vocabulary").read_text().splitlines()]
    assert len(vocabulary) == description["vocabulary"]
    counts = [int(count) for _, count in vocabulary]
    assert counts == sorted(counts, reverse=True)
    tokens = {token for token, _ in vocabulary}
    for side in ("en", "de"):
        lines = (small.data / f"train.{side}").read_text().splitlines()
        assert len(lines) == 5 and all(set(line.split(" ")) <= tokens for line in lines)
        text = [" ".join(pair[side == "de"].split()) for pair in PAIRS]
        assert [Tokenizer(side).detokenize(join_bpe(line)) for line in lines] == text
    assert (small.data / "test.reference").read_text().splitlines() == [pair[1] for pair in PAIRS]


def test_other_pieces_of_the_same_text(small: SmallCorpus) -> None:
    small.configure(pieces={"spm60": {"kind": "sentencepiece", "size": 60}})
    assert small.prepare() == 0
    folder = small.data / "spm60"
    assert len((folder / "vocabulary").read_text().splitlines()) + 4 == 60
    for place, side in enumerate(("en", "de")):
        for split in ("train", "valid", "test"):
            pieces = (folder / f"{split}.{side}").read_text().splitlines()
            text = [" ".join(pair[place].split()) for pair in PAIRS]
            assert [joiner("sentencepiece", side)(line) for line in pieces] == text
    assert (small.data / "text" / "test.de").read_text() == (small.data / "test.reference").read_text()


def test_second_run_does_nothing_and_changes_are_followed(
    small: SmallCorpus, capsys: pytest.CaptureFixture[str]
) -> None:
    def ran() -> list[str]:
        assert small.prepare() == 0
        out = capsys.readouterr().out.splitlines()
        return [line.split(":")[0] for line in out if line.endswith(": running")]

    everything = ran()
    assert everything[0] == "tokenize-train" and everything[-2:] == ["vocabulary", "classes"]
    assert ran() == []
    first = json.loads((small.data / "data.json").read_text())["checksum"]
    small.write("test_2016_flickr.de.gz", "Anders.\n" * 5)
    small.configure()
    assert ran() == ["tokenize-test", "apply-bpe"]
    assert json.loads((small.data / "data.json").read_text())["checksum"] != first
    (small.data / "bpe.codes").write_text("damaged")
    assert ran() == ["learn-bpe"]


def test_missing_file_is_downloaded(small: SmallCorpus, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    small.configure(url=elsewhere.as_uri())
    (small.raw / "val.en.gz").rename(elsewhere / "val.en.gz")
    assert small.prepare() == 0
    assert (small.runs / "multi30k_ende" / "raw" / "val.en.gz").exists()


@pytest.mark.parametrize(
    ("damage", "printed"),
    [
        ({}, ["val.de.gz", "SHA-256"]),
        ({"url": "http://127.0.0.1:9"}, ["http://127.0.0.1:9/val.en.gz", "$DATA_DIR"]),
        ({"file": b"cut"}, ["truncated"]),
        ({"file": "Zwei.\nDrei.\n"}, ["train.en.gz has 5 lines", "train.de.gz has 2 lines"]),
    ],
)
def test_wrong_files_and_settings_are_named_on_one_line(
    small: SmallCorpus,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    damage: dict[str, Any],
    printed: list[str],
) -> None:
    monkeypatch.setattr(datasets.time, "sleep", lambda seconds: None)
    content = damage.pop("file", None)
    if isinstance(content, str):
        small.write("train.de.gz", content)
    elif content:
        (small.raw / "train.de.gz").write_bytes((small.raw / "train.de.gz").read_bytes()[:-9])
    if "url" in damage:
        (small.raw / "val.en.gz").unlink()
    small.configure(**damage)
    if not damage and content is None:
        small.write("val.de.gz", "other\n")
    assert small.prepare() == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("preprocess:")]
    assert all(part in line for part in printed), line


def run_script(name: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one of the recipe's scripts from another folder, with this environment's Python."""
    return subprocess.run(
        [RECIPE.folder / name, *arguments],
        cwd=folder,
        env={**os.environ, "VIRTUAL_ENV": str(Path(sys.executable).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_scripts_work_from_any_folder(small: SmallCorpus, tmp_path: Path) -> None:
    done = run_script("preprocess.sh", "--settings", "data.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for script in ("train.sh", "eval.sh"):
        helped = run_script(script, "--help", folder=tmp_path)
        assert helped.returncode == 0 and "funnel_4x" in helped.stdout
        bare = run_script(script, folder=tmp_path)
        assert bare.returncode == 2 and bare.stderr == helped.stdout
        wrong = run_script(script, "funel", folder=tmp_path)
        assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "no row 'funel'" in wrong.stderr
    early = run_script("eval.sh", "standard", folder=tmp_path)
    assert early.returncode == 2 and early.stderr.count("\n") == 1
    assert "multi30k_ende/train.sh standard" in early.stderr


def test_subwords_and_tokens_are_joined() -> None:
    assert join_bpe("An@@ trie@@ b und S@@ tr@@") == "Antrieb und Str"
    tokenizer = Tokenizer("de")
    for text in ("Bei Trader Joe's im T-Shirt & [innen].", "Ca. 120 cm, 5,3 km!"):
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_rows_are_a_quarter_or_an_eighth_of_the_table() -> None:
    """Codes and groups of words, whose sizes depend on counts, are close to it.

    Quantized tables are compared by their bytes, not by their parameters.
    """
    for name, row in RECIPE.rows.items():
        if row.embedding["method"] == "quantized" or row.data:
            continue
        times = times_fewer(row, 4120)
        if row.embedding["method"] in ("structured", "compositional_code", "group_reduce"):
            assert 3.9 < times < 12
        elif row.embedding["method"] != "standard":
            assert times == pytest.approx(8 if "_8x" in name else 4, rel=0.05)

    for name in ("projective_64", "funnel_64_distilled", "adaptive", "alone_real", "alone_binary"):
        row = RECIPE.row(f"small_{name}")
        assert times_fewer(row, 8000) == pytest.approx(3.9, abs=0.11) and row.train["hidden_size"] == 256


@pytest.mark.parametrize("name", RECIPE.rows)
def test_rows_differ_only_in_their_embedding(name: str) -> None:
    """Except smaller networks, other rates, and rows that start from a trained model, with fewer steps."""
    row = RECIPE.row(name)
    standard = RECIPE.row("standard" if row.distill or name == "standard" else "standard_short")
    if row.data:
        standard = RECIPE.row("small_standard")
    if name == "standard_short":
        assert RECIPE.row("standard").train == {**row.train, "train_steps": 14000}
    assert row.translate == standard.translate
    assert row.average == standard.average or row.distill or row.fit
    differing = {key for key in {**row.train, **standard.train} if row.train[key] != standard.train[key]}
    schedule = {"train_steps", "learning_rate", "warmup_steps"} - ({"train_steps"} if row.data else set())
    differing -= {"seed"} if SEED in name else set()
    # Rows in fp32 start from a teacher in fp32.
    if (row.distill["teacher"] if row.distill else name).startswith("standard_fp32"):
        differing -= {"autocast"}
    if row.distill:
        assert differing - {"save_checkpoint_steps"} == schedule
    else:
        expected = {"hidden_size", "word_vec_size"} if "smaller_" in name else set()
        assert differing == expected | ({"learning_rate"} if "_rate_" in name else set())
    assert row.train["keep_checkpoint"] >= row.average


def test_a_table_has_the_rows_of_a_pattern_or_all_others() -> None:
    rows = {
        pattern: [record["row"] for record in records_of(RECIPE.rows, [], pattern)]
        for pattern in ("small_*", "!small_*")
    }
    assert rows["small_*"][0] == "small_standard" and "smaller_4x" in rows["!small_*"]
    shown = sorted(rows["small_*"] + rows["!small_*"])
    assert shown == sorted(name for name in RECIPE.rows if SEED not in name)


def test_distilled_row_names_its_teacher(small: SmallCorpus) -> None:
    row = RECIPE.row("funnel_4x_distilled")
    model = small.runs / "multi30k_ende" / "standard" / AVERAGED
    model.parent.mkdir(parents=True)
    model.touch()
    train = complete_row(RECIPE, row).train
    assert train == {**row.train, "embedding_distillation": {"teacher": str(model), "alpha": 0.01}}
    scratch = RECIPE.row("funnel_4x")
    assert complete_row(RECIPE, scratch) == scratch


TINY = (
    "-hidden_size 16 -word_vec_size 16 -heads 2 -transformer_ff 16 -enc_layers 1 -dec_layers 1 "
    "-batch_size 64 -valid_steps 2 -save_checkpoint_steps 2 -report_every 2"
).split()


@pytest.mark.slow
def test_training_resumes_and_is_scored(small: SmallCorpus, tmp_path: Path) -> None:
    assert small.prepare() == 0
    first = run_script("train.sh", "funnel_8x", *TINY, "-train_steps", "4", folder=tmp_path)
    assert first.returncode == 0, first.stderr
    run = small.runs / "multi30k_ende" / "funnel_8x"
    newest = run / "checkpoints" / "model_step_4.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    again = run_script("train.sh", "funnel_8x", *TINY, "-train_steps", "6", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "resuming from step 2" in again.stdout and "averaging steps 2, 4, 6" in again.stdout
    scored = run_script("eval.sh", "funnel_8x", "-max_length", "10", folder=tmp_path)
    assert scored.returncode == 0, scored.stderr
    assert len((run / "test.translation").read_text().splitlines()) == len(PAIRS)
    (record,) = read_results(small.runs / "multi30k_ende")
    assert record["row"] == "funnel_8x" and record["metrics"]["tokens_per_second"] > 0
    vocabulary = record["counts"]["dense_embedding"] // 16
    expected = se.num_parameters("funnel", num_embeddings=vocabulary, embedding_dim=16, rank=15)
    assert record["counts"]["embedding"] == expected
    assert record["config"]["train"]["hidden_size"] == 16
    assert record["config"]["train_options"][-2:] == ["-train_steps", "6"]
