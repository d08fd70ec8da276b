"""Reconstruction of word vectors: preparation, cells of a grid that are fitted, and the tables and figures.

Axes: ``V`` words that are reconstructed, ``D`` dimension.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import shared_embeddings as se
from lm.data import datasets
from recipes.common.plot import (
    PLAIN,
    best_of_each_size,
    draw_lines,
    draw_points,
    finish,
    format_name,
    new_figure,
    shown_method,
    style,
    write_png,
)
from recipes.common.recipe import FILE, Recipe, read_file
from recipes.common.results import FILE as RESULTS
from recipes.common.results import Record, find_result, read_results, write_result
from recipes.common.table import Column, markdown_table, number, update_readme
from recipes.common.tools import (
    SMOKE,
    data_dir,
    generated_vocabulary,
    locate,
    matching,
    read_json,
    run_step,
    write_arrays,
    write_json,
)
from shared_embeddings.accounting import distinct_state
from shared_embeddings.analysis import WordPairs, read_pairs, word_similarity
from shared_embeddings.compress.fit import report
from shared_embeddings.compress.sizing import options_within
from shared_embeddings.modules.alone import AloneOptions
from shared_embeddings.quant.packed_tensor import install
from shared_embeddings.quant.storage import hold, pack
from shared_embeddings.utils.command_line import Parser, positive
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import replacing, sha256, write_lines, write_text
from shared_embeddings.utils.options import parse_options
from shared_embeddings.utils.paths import existing_file, existing_path
from shared_embeddings.words.classes import train_word_vectors
from shared_embeddings.words.token_counts import count_words
from shared_embeddings.words.vectors import WordVectors, read_vectors

# Folder of the word pairs in $DATA_DIR.
WORD_PAIRS = "word-similarity"
# Words, dimensions and pairs of --smoke; words of its grid.
WORDS, DIMENSIONS, PAIRS, CHOSEN = 80, 12, 50, 60
SMOKE_GRID_HELP = "use a small grid and the data of preprocess.sh --smoke"
# Pictures and markers of the README.
FIGURE, COMPARED = "figure3.png", "compressed.png"
MARKER, COMPARISON = "results", "comparison"


@dataclass(frozen=True)
class Cell:
    """One embedding to fit to the source vectors: a row of ALONE, another method, or a row of one size.

    ``hidden`` is D_inter of ALONE, which determines the size of other methods; None for rows of one size.
    """

    row: str
    hidden: int | None
    seed: int

    @property
    def name(self) -> str:
        return self.row if self.hidden is None else f"{self.row}-{self.hidden}-{self.seed}"


@dataclass(frozen=True)
class Training:
    """How rows of ALONE are trained."""

    epochs: int = 1000
    batch_size: int = 256
    learning_rate: float = 0.001
    schedule: Literal["constant", "cosine"] = "constant"


@dataclass(frozen=True)
class Grid:
    """A grid of ``rows.yaml``, which explains each part.

    Optional parts are ``fit_steps`` for methods that are fitted by gradient descent (default: the method's),
    ``learning_rates`` of rows of ALONE that differ from ``training``, and ``fixed``, rows of one size.
    """

    words: int
    alone: dict[str, dict[str, Any]]
    hidden: tuple[int, ...]
    seeds: tuple[int, ...]
    training: Training = Training()
    fit_steps: int | None = None
    learning_rates: dict[str, float] = field(default_factory=dict)
    fixed: dict[str, dict[str, Any]] = field(default_factory=dict)

    def sizes(self) -> list[tuple[str, int | None]]:
        """Return all rows and widths: the rows of ALONE, the other methods, and rows of one size."""
        # A plain table would be exact; ALONE has separate rows.
        others = (method for method in se.methods() if method not in ("standard", "alone"))
        several = [(row, hidden) for row in (*self.alone, *others) for hidden in self.hidden]
        return [*several, *((row, None) for row in self.fixed)]

    def cells(self, patterns: Sequence[str] = ("*",)) -> list[Cell]:
        """Return the cells whose names match a pattern by row, smallest first."""
        cells = {
            cell.name: cell
            for row, hidden in self.sizes()
            for seed in (self.seeds if row in self.alone else self.seeds[:1])
            for cell in [Cell(row, hidden, seed)]
        }
        return [cells[name] for name in matching(cells, patterns, "cell")]

    def config(self, cell: Cell, words: int, dim: int) -> dict[str, Any]:
        """Return all settings that determine the result of a cell, for V words in D dimensions.

        Other methods have as many bytes, including codes, as ALONE's parameters at the same width; ALONE's
        filters follow from a seed.
        """
        if cell.row in self.alone:
            options = {"hidden_dim": cell.hidden, **self.alone[cell.row], "seed": cell.seed}
            rate = self.learning_rates.get(cell.row, self.training.learning_rate)
            training = asdict(replace(self.training, learning_rate=rate))
            return {**vars(cell), "embedding": {"method": "alone", **options}, "training": training}
        if cell.hidden is None:
            fixed = dict(self.fixed[cell.row])
            stored = {"store": fixed.pop("store")} if "store" in fixed else {}
            config = {**vars(cell), "embedding": fixed, **stored}
        else:
            sizes = {"num_embeddings": words, "embedding_dim": dim}
            limit = 4 * se.num_parameters("alone", **sizes, hidden_dim=cell.hidden)
            try:
                options = dict(options_within(cell.row, words, dim, limit))
            except se.OptionError as error:
                raise UserError(f"{cell.name}: {error}") from error
            options.pop("random_classes", None)  # a fit determines the classes
            config = {**vars(cell), "embedding": {"method": cell.row, **options}}
        return config if self.fit_steps is None else {**config, "fit_steps": self.fit_steps}


def read_grid(recipe: Recipe, name: str = "full") -> Grid:
    """Return a grid of a recipe's ``rows.yaml``; with ``--smoke``, a small one with the same rows."""
    path = recipe.folder / FILE
    grids = read_file(path).get("grids", {})
    if name not in grids:
        raise UserError(f"{path}: no grid {name!r}; there are: {', '.join(grids)}")
    grid = parse_options(f"{path}: {name}", Grid, grids[name])
    if not recipe.is_smoke:
        return grid
    training = replace(grid.training, epochs=2, batch_size=20)
    return replace(grid, words=CHOSEN, hidden=(16,), seeds=grid.seeds[:1], fit_steps=20, training=training)


def parser_of(script: str, description: str | None, smoke_help: str) -> Parser:
    """Return the parser of a script with the options of all scripts."""
    parser = Parser(script, description=description)
    parser.add_argument("--grid", default="full", help="a grid of rows.yaml (default: %(default)s)")
    parser.add_argument(SMOKE, action="store_true", help=smoke_help)
    return parser


# preprocess.sh


def read_source(path: Path) -> WordVectors:
    """Read ``words`` and their ``vectors`` (V, D)."""
    with np.load(path, allow_pickle=False) as stored:
        return WordVectors(stored["words"].tolist(), stored["vectors"])


def download_glove(entry: Mapping[str, Any], folder: Path) -> Path:
    """Return the text of GloVe's vectors, after downloading and unpacking it if necessary.

    An entry has ``url``, ``file`` in the archive, and ``sha256`` of the archive or None.
    """
    text = folder / entry["file"]
    if not text.is_file():
        url, _, name = entry["url"].rpartition("/")
        archive = locate(name, "glove", url, folder, entry["sha256"])
        # Reading to the end verifies the checksum in the archive.
        with zipfile.ZipFile(archive) as packed, packed.open(entry["file"]) as source:
            with replacing(text) as temporary, temporary.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    return text


def train_source(texts: Sequence[Path], settings: Mapping[str, Any], output: Path) -> None:
    """Train skip-gram vectors on lowercased texts, and write them in order of word frequency."""
    lower = output.with_suffix(".txt")
    write_text(lower, "".join(text.read_text(encoding="utf-8").lower() for text in texts))
    counts = count_words([lower])
    markers = ("<unk>", "<eos>")
    common = [word for word in counts if counts[word] >= settings["min_count"] and word not in markers]
    # Sorting is stable: ties keep their order.
    words = sorted(common, key=lambda word: -counts[word])
    asked = {name: settings[name] for name in ("dim", "window", "epochs", "seed")}
    vectors = train_word_vectors([lower], words, **asked)
    write_arrays(output, {"words": np.array(words), "vectors": vectors})


def score(vectors: WordVectors, tests: Sequence[WordPairs]) -> dict[str, dict[str, Any]]:
    """Return Spearman's rho and the number of known pairs for every set of pairs."""
    results = [word_similarity(vectors.words, vectors.vectors, test) for test in tests]
    return {test.name: {"rho": test.rho, "known": test.known, "pairs": test.pairs} for test in results}


def write_smoke_pairs(folder: Path, names: Sequence[str]) -> list[Path]:
    """Write files of random word pairs and scores, with the names of the published ones."""
    words = generated_vocabulary()[:WORDS]
    paths = [folder / name for name in names]
    for seed, path in enumerate(paths):
        draw = np.random.default_rng(seed)
        chosen = [draw.choice(words, size=2, replace=False) for _ in range(PAIRS)]
        write_lines(path, (f"{first}\t{second}\t{draw.uniform(0, 10):.2f}" for first, second in chosen))
    return paths


def preprocess(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Prepare word vectors and word pairs in $RUNS/glove_reconstruction/data.

    Without --vectors or --glove, skip-gram vectors are trained on WikiText-2 from $DATA_DIR or the network.
    """
    _, settings = recipe.data_settings()
    parser = parser_of("preprocess.sh", preprocess.__doc__, "use random vectors of a few words")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--vectors", type=existing_file, help="vectors of GloVe, word2vec or fastText")
    chosen.add_argument("--glove", choices=sorted(settings["glove"]), help="download these vectors")
    parser.add_argument("--limit", type=positive, help="number of vectors to read")
    parser.add_argument(
        "--pairs", nargs="+", type=existing_file, help="files with two words and a score per line"
    )
    options = parser.parse_args(arguments)
    recipe = recipe.smoke() if options.smoke else recipe
    words, downloads = read_grid(recipe, options.grid).words, recipe.home / "downloads"
    names, url = settings["pairs"]["files"], settings["pairs"]["url"]
    if options.smoke:
        pairs = write_smoke_pairs(recipe.home / "raw", names)
        numbers = np.random.default_rng(0).normal(size=(WORDS, DIMENSIONS))
        lines = (" ".join(f"{number:.5f}" for number in row) for row in numbers)
        vectors = recipe.home / "raw" / "vectors.txt"  # in GloVe's format
        write_lines(vectors, (f"{word} {line}" for word, line in zip(generated_vocabulary(), lines)))
    else:
        pairs = options.pairs or [locate(name, WORD_PAIRS, url, downloads) for name in names]
        if options.vectors is not None:
            vectors = options.vectors
        elif options.glove is not None:
            vectors = download_glove(settings["glove"][options.glove], downloads)
        else:
            skipgram, vectors = settings["skipgram"], recipe.home / "skipgram.npz"
            texts = datasets.locate(skipgram["dataset"], data_dir(), downloads)["train"]
            asked = (train_source, texts, skipgram, vectors)
            run_step(recipe.home / "steps", "skip-gram", texts, [vectors], *asked, **skipgram)
    source = read_source(vectors) if vectors.suffix == ".npz" else read_vectors(vectors, options.limit)
    tests, folder = [read_pairs(path) for path in pairs], recipe.data
    if len(source.words) < words:
        raise UserError(
            f"there are {len(source.words)} words, fewer than 'words: {words}' in rows.yaml; lower it, or "
            "use other vectors"
        )
    selected = WordVectors(source.words[:words], source.vectors[:words])
    # Written last, to mark the preparation as complete.
    (folder / "data.json").unlink(missing_ok=True)
    arrays = {"words": np.array(selected.words), "vectors": selected.vectors}
    write_arrays(folder / "source.npz", arrays)
    with replacing(folder / "pairs") as copies:  # the given files may be those in the old folder
        copies.mkdir()
        for path in pairs:
            shutil.copyfile(path, copies / path.name)
    description: dict[str, Any] = {
        "vectors": vectors.name,
        "vectors_sha256": sha256(vectors),
        "words": words,
        "dimensions": int(selected.vectors.shape[1]),
        "pairs": [path.name for path in pairs],
        "source": score(selected, tests),
        "source_all_words": {"words": len(source.words), **score(source, tests)},
        "checksum": sha256(folder / "source.npz"),
    }
    write_json(folder / "data.json", description)
    for name, result in description["source"].items():
        print(f"{name}: rho {result['rho']}, {result['known']} of {result['pairs']} pairs known")
    print(f"prepared {folder}")


# train.sh


def fit_alone(
    teacher: Tensor, options: Mapping[str, Any], training: Mapping[str, Any], title: str
) -> se.SharedEmbedding:
    """Minimize the mean of ``||e - FFN(m * o)||**2`` over words (ALONE, Eq. 4) with Adam.

    The table of the teacher is ``(V, D)``. Batches are sampled uniformly from the vocabulary; an epoch has V
    words (section 3.1).
    """
    words, dim = teacher.shape
    with torch.random.fork_rng():
        torch.manual_seed(options["seed"])
        embedding = se.build("alone", num_embeddings=words, embedding_dim=dim, **options)
    draw = torch.Generator().manual_seed(options["seed"])
    parameters = [parameter for parameter in embedding.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=training["learning_rate"])
    batch = min(training["batch_size"], words)
    steps = training["epochs"] * -(-words // batch)
    schedule = (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        if training["schedule"] == "cosine"
        else torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    )
    bar = tqdm(range(steps), desc=title, unit=" steps", mininterval=1.0)
    for _ in bar:
        ids = torch.randint(words, (batch,), generator=draw)
        loss = (embedding(ids) - teacher[ids]).square().sum(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if bar.n % 50 == 0:
            bar.set_postfix(loss=f"{float(loss.detach()):.4g}", refresh=False)
    return embedding.eval()


def run_cell(
    home: Path, config: Mapping[str, Any], name: str, words: WordVectors, pairs: list[str]
) -> Record:
    """Fit a cell to the source vectors as `config` says; return its ``counts`` and ``metrics``."""
    teacher = torch.from_numpy(words.vectors)
    options = dict(config["embedding"])
    method = options.pop("method")
    started = time.perf_counter()
    if "training" in config:
        embedding = fit_alone(teacher, options, config["training"], name)
    else:
        steps, seed = config.get("fit_steps"), config["seed"]
        embedding = se.fit(method, teacher, seed=seed, steps=steps, **options)[0].eval()
        if store := config.get("store"):
            state = distinct_state(embedding)
            embedding.load_state_dict(install(embedding, hold(pack(state, state, store))), strict=False)
    fitted = report(embedding, teacher, seconds=time.perf_counter() - started)
    with torch.no_grad():
        reconstructed = WordVectors(words.words, embedding.table().numpy())
    tests = [read_pairs(home / "data" / "pairs" / name) for name in pairs]
    return {
        "counts": {
            "embedding": fitted.parameters,
            "stored_bits": fitted.stored_bits,
            "table": teacher.numel(),
        },
        "metrics": {
            "squared_loss": fitted.squared_loss,
            "relative_error": fitted.relative_error,
            "similarity": score(reconstructed, tests),
            "training_seconds": fitted.seconds,
        },
    }


def train(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Fit and measure cells of the grid; cells with results are skipped."""
    parser = parser_of("train.sh", train.__doc__, SMOKE_GRID_HELP)
    what = "names or patterns such as 'alone_real-*-0' (default: all)"
    parser.add_argument("cells", nargs="*", default=["*"], help=what)
    parser.add_argument("--list", action="store_true", help="only list the cells")
    options = parser.parse_args(arguments)
    recipe = recipe.smoke() if options.smoke else recipe
    grid = read_grid(recipe, options.grid)
    cells = grid.cells(options.cells)
    if options.list:
        print("\n".join(cell.name for cell in cells))
        return
    data = read_json(recipe.data / "data.json")
    if data is None:
        raise UserError(f"{recipe.data}: no prepared vectors; run preprocess.sh")
    words = read_source(recipe.data / "source.npz")
    if len(words.words) != grid.words:
        raise UserError(
            f"{recipe.data}: {len(words.words)} words are prepared, but the grid has 'words: {grid.words}'; "
            "run preprocess.sh with this grid"
        )
    configs = {}
    for cell in cells:
        try:
            configs[cell.name] = grid.config(cell, *words.vectors.shape)
        except UserError as error:  # the method cannot be small enough
            if len(cells) == 1:
                raise
            print(f"skipped: {error}", flush=True)
    for name, config in configs.items():
        result = find_result(recipe.home, name)
        if result is not None:
            if (result["config"], result["data_checksum"]) != (
                json.loads(json.dumps(config)),
                data["checksum"],
            ):
                raise UserError(
                    f"{recipe.home / RESULTS}: {name} has other settings or vectors; move it away or restore "
                    "them"
                )
            print(f"{name}: has a result", flush=True)
            continue
        measured = run_cell(recipe.home, config, name, words, data["pairs"])
        measured["metrics"]["source_similarity"] = data["source"]
        path = write_result(recipe.home, name, config=config, data_checksum=data["checksum"], **measured)
        print(f"{name}: wrote {path}", flush=True)


# eval.sh


def evaluate(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Write the results into the README's table, and plot Figure 3 next to it."""
    parser = parser_of("eval.sh", evaluate.__doc__, f"{SMOKE_GRID_HELP}, and a separate README")
    parser.add_argument(
        "--results",
        type=existing_path,
        default=recipe.home,
        help="results.jsonl, or a folder with one (default: %(default)s)",
    )
    parser.add_argument(
        "--readme",
        type=existing_file,
        default=recipe.folder / "README.md",
        help="README with the markers (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.smoke:
        recipe = recipe.smoke()
        options.results, options.readme = recipe.home, recipe.home / "README.md"
        markers = (f"<!-- BEGIN {name} -->\n<!-- END {name} -->\n" for name in (MARKER, COMPARISON))
        write_text(options.readme, "".join(markers))
    write_report(read_grid(recipe, options.grid), options.results, options.readme)


def write_report(grid: Grid, results: Path, readme: Path) -> None:
    """Write the results of a grid into a README, and plot the figures next to it.

    The vectors with the most results are those of ALONE's figure, and the vectors with the most rows of one
    size those of the comparison; they may be different ones.
    """
    by_vectors: dict[str, list[Record]] = {}
    for record in read_results(results):
        by_vectors.setdefault(record["data_checksum"], []).append(record)
    by_row = {
        row["row"] for records in by_vectors.values() for row in summaries(grid, records) if row["metrics"]
    }
    if not by_row:
        raise UserError(
            f"{results}: has no results of this grid; run train.sh first, or select one with --grid"
        )
    most = max(by_vectors.values(), key=len)
    summary = [row for row in summaries(grid, most) if row["metrics"] or row["row"] not in by_row]
    source = most[0]["metrics"]["source_similarity"]
    alone = AloneOptions(hidden_dim=grid.hidden[0], **next(iter(grid.alone.values())))
    # The paper's approximation of the birthday problem.
    collision = -math.expm1(-(grid.words**2) / (2 * alone.codebook_size**alone.codebooks))
    text = table(grid, summary, source) + (
        f"\nWith {alone.codebooks} codebooks of {alone.codebook_size} entries, two of the {grid.words:,} "
        f"words share all codes in ALONE with a probability of {collision:.1e} (section 2.1).\n"
    )
    if any(record["metrics"] and record["config"]["row"] in grid.alone for record in summary):
        draw_figure(summary, source, grid, readme.parent / FIGURE)
        text += f"\n![Spearman's rho against the width]({FIGURE})\n"
    update_readme(readme, MARKER, text)
    of_one_size = {
        data: sum(record["config"]["hidden"] is None for record in records)
        for data, records in by_vectors.items()
    }
    compared = by_vectors[max(of_one_size, key=lambda data: of_one_size[data])]
    if any(of_one_size.values()):
        source = compared[0]["metrics"]["source_similarity"]
        summary = [row for row in summaries(grid, compared) if row["metrics"]]
        summary.sort(key=lambda row: row["counts"]["stored_bits"])
        draw_comparison(summary, source, readme.parent / COMPARED)
        picture = f"![Error and Spearman's rho against the stored bytes]({COMPARED})"
        update_readme(readme, COMPARISON, f"{table(grid, summary, source)}\n{picture}\n")
    print(f"wrote the results into {readme}")


def summaries(grid: Grid, records: Sequence[Record]) -> list[Record]:
    """Return one record per row and width with means over seeds; without metrics if there are no results."""
    summary: list[Record] = []
    for row, hidden in grid.sizes():
        cells = [
            cell for cell in records if (cell["config"]["row"], cell["config"]["hidden"]) == (row, hidden)
        ]
        record: Record = {"row": f"{row}-{hidden}", "config": {"row": row, "hidden": hidden}}
        record |= {"counts": {}, "metrics": {}}
        if cells:
            metrics = [cell["metrics"] for cell in cells]
            means: Record = {"seeds": len(cells)}
            for name in ("squared_loss", "relative_error", "training_seconds"):
                means[name] = statistics.mean(values[name] for values in metrics)
            means["similarity"] = {
                name: _spread([values["similarity"][name]["rho"] for values in metrics])
                for name in metrics[0]["similarity"]
            }
            record |= {"config": cells[0]["config"], "counts": cells[0]["counts"], "metrics": means}
        summary.append(record)
    return summary


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return the mean and the standard deviation; None if a value is undefined."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return {"mean": statistics.mean(known), "std": statistics.stdev(known) if len(known) > 1 else 0.0}


def table(grid: Grid, summary: Sequence[Record], source: Mapping[str, Any]) -> str:
    """Return the Markdown table of the source vectors and all rows."""
    size = next(record["counts"]["table"] for record in summary if record["counts"])
    metrics: Record = {"seeds": 1, "squared_loss": 0.0, "relative_error": 0.0, "training_seconds": 0.0}
    metrics["similarity"] = {name: _spread([result["rho"]]) for name, result in source.items()}
    first: Record = {
        "row": "source",
        "config": {"row": f"source, {size // grid.words} dimensions", "hidden": None},
        "counts": {"embedding": size, "stored_bits": 32 * size, "table": size},
        "metrics": metrics,
    }

    def rho(name: str, record: Record) -> str:
        value = record["metrics"]["similarity"][name]
        if value is None:
            return "undefined"
        spread = f" ± {value['std']:.3f}" if record["metrics"]["seeds"] > 1 else ""
        return f"{value['mean']:.3f}{spread}"

    columns = [
        Column("vectors", lambda r: r["config"]["row"], always=True),
        Column("hidden", lambda r: str(r["config"]["hidden"] or "–"), always=True),
        Column("parameters", number("{:,}", "counts", "embedding")),
        Column("kB stored", number("{:,.0f}", "counts", "stored_bits", factor=1 / 8000)),
        Column("bits per weight", lambda r: f"{r['counts']['stored_bits'] / r['counts']['table']:.2f}"),
        Column("seeds", number("{}", "metrics", "seeds")),
        Column("squared loss", number("{:.3f}", "metrics", "squared_loss")),
        Column("relative error", number("{:.3f}", "metrics", "relative_error")),
        *(Column(f"rho {name}", partial(rho, name)) for name in source),
        Column("seconds", number("{:.0f}", "metrics", "training_seconds")),
    ]
    return markdown_table([first, *summary], columns)


def draw_figure(summary: Sequence[Record], source: Mapping[str, Any], grid: Grid, path: Path) -> None:
    """Plot rho over the width, one panel per set (ALONE, Figure 3); bars are one standard deviation."""
    figure, panels = new_figure(len(source), "ALONE on skip-gram vectors: similarity of words", shared=False)
    look = style("alone")
    for axes, (name, result) in zip(panels, source.items(), strict=True):
        for series, row in enumerate(grid.alone):
            values = {
                record["config"]["hidden"]: record["metrics"]["similarity"][name]
                for record in summary
                if record["config"]["row"] == row and record["metrics"]
            }
            values = {hidden: value for hidden, value in values.items() if value is not None}
            axes.errorbar(
                [hidden + 24 * (series - (len(grid.alone) - 1) / 2) for hidden in values],
                [value["mean"] for value in values.values()],
                yerr=[value["std"] for value in values.values()],
                **look,
                linestyle=("-", "--", ":", "-.")[series % 4],
                fillstyle=("full", "none", "left", "bottom")[series % 4],
                linewidth=1,
                capsize=2,
                label=row.replace("_", " "),
            )
        if result["rho"] is not None:
            axes.axhline(
                result["rho"], color="#333333", linewidth=1, zorder=1, label="the vectors themselves"
            )
        axes.set_title(f"{name}: {result['known']} of {result['pairs']} pairs", fontsize=9)
        axes.set_xticks(grid.hidden)
        axes.set_xlabel("hidden width")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("Spearman's rho")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    write_png(figure, path)


def draw_comparison(summary: Sequence[Record], source: Mapping[str, Any], path: Path) -> None:
    """Plot the relative error and rho against the stored bytes: the best row of each method and size."""
    # The rho of fewer known pairs means little.
    sets = [name for name, result in source.items() if result["known"] >= 100]
    plain = [record for record in summary if shown_method(record) == PLAIN]
    best = best_of_each_size(summary, "relative_error", plain)

    def label(record: Record) -> str:  # the format of a plain table, or the codec of a quantized one
        config = record["config"]
        if shown_method(record) == PLAIN:
            return str(config.get("store") or format_name(record))
        return str(config["embedding"].get("codec", ""))

    figure, panels = new_figure(1 + len(sets), "word vectors in few bytes", shared=False)
    for axes, name in zip(panels, ("", *sets), strict=True):
        points = []
        for record in best:
            metrics = record["metrics"]
            shown = metrics["similarity"][name]["mean"] if name else metrics["relative_error"]
            points.append({**record, "metrics": {"shown": float(shown)}})
        draw_lines(axes, points, "shown")
        draw_points(axes, points, "shown", label)
        axes.set_title(f"Spearman's rho, {name}" if name else "relative error", fontsize=9)
        if name:
            axes.axhline(source[name]["rho"], color="#333333", linewidth=1, zorder=1)
        else:
            axes.set_yscale("log")
    finish(figure, panels, path)
