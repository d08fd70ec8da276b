"""The recipes of language models: every row can be trained, and has the published size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shared_embeddings as se
from lm import models
from lm.checkpoint import load_model, save_model
from lm.data.corpus import SPLITS, VOCABULARY
from lm.data.corpus import prepare as prepare_corpus
from lm.data.datasets import SOURCES
from lm.evaluate.command import _parser as evaluation_parser
from lm.evaluate.evaluation import PointerOptions
from lm.models import LanguageModel
from lm.train.config import parse
from recipes import language_model
from recipes.common.recipe import Recipe, Row, describe_size, find_recipe
from recipes.common.tools import run_main
from recipes.language_model import as_options, read_settings
from shared_embeddings.compress import host as compression_hosts
from shared_embeddings.compress.session import compress
from shared_embeddings.utils.errors import UserError
from shared_embeddings.words.classes import WordClasses, train_word_vectors

PTB, WIKITEXT2, LSTM, XL = (
    *("ptb_awd_lstm", "wikitext2_awd_lstm"),
    *("wikitext103_lstm", "wikitext103_transformer_xl"),
)
ROWS = [(name, row) for name in (PTB, WIKITEXT2, LSTM, XL) for row in find_recipe(name).rows]
CODES = [(name, row) for name, row in ROWS if row.endswith("_codes")]
PUBLISHED = [(name, row) for name, row in ROWS if row.startswith("table") and (name, row) not in CODES]
# The allowed difference of DeFINE's totals: its own tables differ by 2 % for the same unit.
UNIT, UNEXPLAINED = 0.05, dict.fromkeys(("table7_n512_k2048", "table8a_residual"), 0.07)
# An error in the paper: 27.01 instead of 27.10.
MISTAKE = {(WIKITEXT2, "table4_unique200"): 27.10}
# DeFINE, Tables 1a and 2, in millions: the widest network is R5's, and 8b's takes all of k = 1024.
CONTEXT = {
    (LSTM, "table1a_standard"): 23.36,
    (LSTM, "table1a_define_n256"): 23.36,
    (LSTM, "table1a_define_n384"): 24.73,
    (LSTM, "table1a_define_n512"): 26.24,
    (XL, "table2_standard_n410"): 41.07,
    (XL, "table2_standard"): 36.25,
    (XL, "table2_define_n64"): 36.25,
}


def read(recipe: str, row: str) -> Row:
    return find_recipe(recipe).row(row)


def types_of(recipe: str, row: Row) -> int:
    """The words of the corpus of a row."""
    settings = read_settings(find_recipe(recipe))
    dataset = str(settings.small) if row.data.get("folder") == "data_small" else settings.dataset
    return SOURCES[dataset].published.types


def build(recipe: str, row: Row) -> LanguageModel:
    """The model of a row, checked as by lm_train, on the meta device; its files need not exist."""
    files = se.options(row.embedding["method"]).file_options
    embedding = {key: se.STORED if key in files else value for key, value in row.embedding.items()}
    config = parse({"data": "d", "output_dir": "s", "embedding": embedding, **row.train})
    words = [str(number) for number in range(types_of(recipe, row))]
    with torch.device("meta"):
        return models.build(config.training.model, words, embedding, config.model_options())


@pytest.mark.slow_except(
    "ptb_awd_lstm-small_projective_8x",
    "ptb_awd_lstm-small_projective_finetuned",
    "ptb_awd_lstm-small_projective_fitted",
    "ptb_awd_lstm-small_structured",
    "ptb_awd_lstm-table14_unique25",
    "wikitext2_awd_lstm-small_uncle",
    "wikitext2_awd_lstm-table4_unique100",
    "wikitext103_lstm-small_standard",
)
@pytest.mark.parametrize(("recipe", "name"), ROWS)
def test_row_can_be_trained_and_evaluated(recipe: str, name: str) -> None:
    row = read(recipe, name)
    assert build(recipe, row).embedding.num_embeddings == types_of(recipe, row)
    if row.distill is not None:
        option = {"embedding_distillation": {**row.distill, "teacher": "best.pt"}}
        parse({"data": "d", "output_dir": "s", "embedding": row.embedding, **row.train, **option})
    if row.finetune is not None:
        parse({"data": "d", "output_dir": "s", "init_from": "b", "embedding": row.embedding, **row.finetune})
    evaluation_parser().parse_args(["-model", __file__, "-data", __file__, *as_options(row.evaluate)])
    if "pointer" in row.evaluate:
        PointerOptions.parse(row.evaluate["pointer"])
    classes = read_settings(find_recipe(recipe)).classes
    for file in se.options(row.embedding["method"]).file_options:
        assert row.embedding.get(file) in {None, *classes}
    if "classes" in row.embedding:
        assert classes[row.embedding["classes"]]["num_classes"] == row.embedding["num_classes"]


@pytest.mark.parametrize(("recipe", "name"), PUBLISHED)
def test_published_rows_have_the_printed_sizes(recipe: str, name: str) -> None:
    row = read(recipe, name)
    assert row.paper is not None and {"source", "perplexity", "hardware"} <= set(row.paper)
    table = name.split("_")[0].removeprefix("table")
    assert table in row.paper["source"].split("Table ")[1]
    if "total" not in row.paper:
        assert recipe in (PTB, WIKITEXT2) and table in ("5", "7", "14")
        return
    model = build(recipe, row)
    total, rest = (se.accounting.count_parameters(part) / 1e6 for part in (model, model.embedding))
    printed = str(row.paper["total"])
    wanted = MISTAKE.get((recipe, name), float(printed))
    allowed = 0.5 * 10 ** -len(printed.partition(".")[2])
    if row.embedding["method"] == "define":
        allowed = UNEXPLAINED.get(name, UNIT) * wanted
    assert total == pytest.approx(wanted, abs=max(allowed, 0.01 if recipe in (LSTM, XL) else 0.0))
    if (recipe, name) in CONTEXT:
        assert total - rest == pytest.approx(CONTEXT[recipe, name], abs=0.005)


@pytest.mark.parametrize(
    ("recipe", "name", "network"),
    # By hand: 4 H (I + H + 2) for each layer of widths I -> H, between the embedding and its scores.
    [
        (PTB, "table4_standard", 20_211_600),
        (PTB, "table1c_define", 7_139_200 + 10_589_200 + 512 * (1150 + 128 + 2)),
        (PTB, "table14_unique25", 4600 * (25 + 1152) + 10_589_200 + 100 * (1150 + 25 + 2)),
        (WIKITEXT2, "table14_unique200", 4600 * (200 + 1152) + 10_589_200 + 800 * 1352),
    ],
)
def test_last_layer_has_the_width_of_its_tied_table(recipe: str, name: str, network: int) -> None:
    model = build(recipe, read(recipe, name))
    count = se.accounting.count_parameters
    assert count(model) - count(model.embedding) == network


def test_finetuned_rows_average_from_the_first_step() -> None:
    twice = {pair[1]: row for pair in PUBLISHED if (row := read(*pair)).finetune}
    assert set(twice) == {"table1c_finetuned_standard", "table5_standard", "table5_unique200"}
    assert all(row.finetune == {**row.train, "optimizer": "asgd", "patience": 5} for row in twice.values())


def test_small_rows_are_a_quarter_or_an_eighth_of_the_table() -> None:
    for recipe, name in [pair for pair in ROWS if pair[1].startswith("small_")]:
        row = read(recipe, name)
        words, method = types_of(recipe, row), row.embedding["method"]
        size = describe_size(row, words)
        times = float(size.split(", ")[1].split()[0])
        if method in ("structured", "group_reduce"):  # sizes also depend on codes or word counts
            assert 3.7 < times < 12
        elif method not in ("standard", "quantized"):  # fewer bits, not fewer parameters
            least, most = (7.7, 8.3) if "_8x" in name else (3.6, 4.4)
            assert least <= times < most, name
        assert size.endswith(f"times fewer than {words:,} x {row.train['embedding_dim']}")


# Words of two kinds in different contexts, so that classes can be found.
TEXT = "the {a} eats a {b}\na {b} sees the {a}\n"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe with a small corpus and three class files."""
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    folder = tmp_path / "small_lm"
    folder.mkdir()
    classes = (
        "data/classes.npz: {num_classes: 4, epochs: 2}, data/few.npz: {num_classes: 2, epochs: 1}, "
        "data/many.npz: {num_classes: 5, epochs: 2}"
    )
    (folder / "rows.yaml").write_text(f"data: {{dataset: ptb, classes: {{{classes}}}}}\n")
    texts = {split: [tmp_path / f"{split}.txt"] for split in SPLITS}
    for [path] in texts.values():
        path.write_text("".join(TEXT.format(a=f"a{n % 7}", b=f"b{n % 5}") for n in range(300)))

    def run_module(name: str, arguments: Sequence[str | Path]) -> None:
        assert name == "lm.data.prepare" and arguments[:3] == ["-dataset", "ptb", "-output"]
        prepare_corpus(texts, Path(arguments[3]))

    monkeypatch.setattr(language_model, "run_module", run_module)
    monkeypatch.setattr(language_model, "locate", lambda *_: texts)
    return Recipe(folder)


def test_class_files_are_made_once_and_share_word_vectors_of_the_same_epochs(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = []

    def train(*arguments: Any, **options: Any) -> np.ndarray:
        trained.append(arguments)
        return train_word_vectors(*arguments, **options)

    monkeypatch.setattr("shared_embeddings.words.classes.train_word_vectors", train)
    language_model.preprocess(recipe, [])
    files = [WordClasses.load(recipe.home / "data" / f"{name}.npz") for name in ("classes", "few", "many")]
    words = [line.split("\t")[0] for line in (recipe.data / VOCABULARY).read_text().splitlines()]
    assert all(list(made.words) == words for made in files)
    assert len(trained) == 2
    assert [made.num_classes for made in files] == [4, 2, 5]
    assert np.array_equal(files[0].vectors, files[2].vectors)
    assert not np.array_equal(files[0].vectors, files[1].vectors)
    capsys.readouterr()
    language_model.preprocess(recipe, [])
    assert re.findall(r"(\w+): up to date", capsys.readouterr().out) == ["classes", "few", "many"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{dataset: ptb}", "option 'classes' is missing"),
        ("{dataset: penn, classes: {}}", "dataset is 'penn'; it may be ptb, wikitext2, wikitext103"),
        ("{dataset: ptb, classes: {}, small: penn}", "small is 'penn'; it may be ptb, wikitext2, wiki"),
        ("{dataset: ptb, classes: {a: 3}}", "classes a: expected settings by name"),
        ("{dataset: ptb, classes: {a: {num_classes: 0, epochs: 1}}}", "num_classes is 0"),
    ],
)
def test_changed_settings_fail(recipe: Recipe, content: str, message: str) -> None:
    (recipe.folder / "rows.yaml").write_text(f"data: {content}\n")
    with pytest.raises(UserError, match=message):
        read_settings(recipe)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("small", "ptb_awd_lstm has no small data; "),
        ("--extra", "'--extra' is not an argument of preprocess.sh; see preprocess.sh --help"),
    ],
)
def test_invalid_arguments_are_one_line(
    argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare = partial(language_model.preprocess, find_recipe("ptb_awd_lstm"))
    assert run_main("preprocess", prepare, [argument]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"preprocess: {message}") and printed.count("\n") == 1


def test_preprocessing_help_lists_its_targets(capsys: pytest.CaptureFixture[str]) -> None:
    for name, printed in (
        (PTB, "usage: preprocess.sh [--smoke]"),
        (LSTM, "wikitext-2 in $RUNS"),
    ):
        with pytest.raises(SystemExit) as ended:
            language_model.preprocess(find_recipe(name), ["--help"])
        assert ended.value.code == 0 and printed in capsys.readouterr().out


@pytest.mark.slow_except("wikitext103_transformer_xl-table5_projective_codes")
@pytest.mark.parametrize(("recipe", "name"), CODES)
def test_codes_take_four_bits_each(recipe: str, name: str) -> None:
    row = read(recipe, name)
    assert row.fit is not None and row.paper is not None and "Table 5" in row.paper["source"]
    teacher = build(recipe, read(recipe, row.fit["teacher"])).embedding
    options = {key: value for key, value in row.embedding.items() if key != "method"}
    replaced = teacher.inner_embedding()
    with torch.device("meta"):
        sizes = {"num_embeddings": replaced.num_embeddings, "embedding_dim": replaced.embedding_dim}
        new = se.build(row.embedding["method"], **sizes, **options)
    assert new.counts()["total"] == 32 * 16 * replaced.embedding_dim
    books = 2 * new.counts()["total"]
    codes = new.counts()["stored_bits"] // 8 - books
    assert codes == 267_735 * 32 * 4 // 8


@pytest.mark.parametrize(("recipe", "name"), CODES)
def test_codes_replace_the_stored_word_vectors(
    recipe: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("lm", "lm.adapter:Adapter", compression_hosts.GROUP)
    monkeypatch.setattr(compression_hosts, "entry_points", lambda group: [point])
    row = read(recipe, name)
    assert row.fit is not None
    teacher = read(recipe, row.fit["teacher"])
    network = {"num_layers": 1, "num_heads": 1, "head_dim": 4, "feed_forward_dim": 8}
    embedding = {**teacher.embedding, "cutoffs": [8, 16, 24]}
    config = parse({"data": "d", "output_dir": "s", "embedding": embedding, **teacher.train, **network})
    words = ["<eos>", "<unk>", *(f"w{number}" for number in range(30))]
    torch.manual_seed(1)
    model = models.build("transformer_xl", words, embedding, config.model_options())
    torch.nn.init.normal_(adaptive_part(model.embedding).cluster_bias)
    stored = {"model": "transformer_xl", "embedding": embedding, **config.model_options()}
    save_model(tmp_path / "best.pt", model, words, stored, None)
    options = {key: value for key, value in row.embedding.items() if key != "method"}
    small = tmp_path / "small.pt"
    compress(tmp_path / "best.pt", row.embedding["method"], small, options=options, steps=2)
    new = load_model(small).model
    assert new.embedding.inner_embedding().method == "compositional_code"
    assert adaptive_part(new.embedding).method == "adaptive"
    assert new.embedding.method == ("define" if "define" in name else "adaptive")
    kept = [key for key in model.state_dict() if ".tables." not in key]
    assert len(kept) > 5 and any(key.endswith("cluster_bias") for key in kept)
    assert all(torch.equal(new.state_dict()[key], model.state_dict()[key]) for key in kept)
    # The codes replace the narrow vectors, in both directions and in every band.
    narrow = new.embedding.inner_embedding().table()
    hidden = torch.randn(3, 384, generator=torch.Generator().manual_seed(1))
    old: Any = model.embedding
    with torch.no_grad():
        for band, table in enumerate(narrow.split(8)):
            adaptive_part(old).tables[str(band)].copy_(table)
    torch.testing.assert_close(new.embedding.log_prob(hidden), old.log_prob(hidden))
    torch.testing.assert_close(new.embedding.table(), old.table())


def adaptive_part(embedding: Any) -> Any:
    """The adaptive layers of an embedding: the map of DeFINE, or the embedding itself."""
    return embedding.map if embedding.method == "define" else embedding
