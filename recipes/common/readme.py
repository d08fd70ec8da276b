"""The tables of a recipe's README, made from its results, and the figure next to it.

``readme`` in ``rows.yaml`` lists the tables. A table has

- ``marker``: of ``<!-- BEGIN marker -->`` and ``<!-- END marker -->``;
- ``table``: ``results`` (a line per row, the default), ``comparison`` (see `recipes.common.comparison`) or
  ``headlines`` (see `recipes.headlines.evaluate`);
- ``rows``: a pattern of the rows' names (default: all); ``from_scratch: true`` leaves out the rows that start
  from a trained one;
- ``quality``: ``bleu`` or ``perplexity``, by which the models are judged;
- ``columns``: names out of `recipes.common.table.COLUMNS`, with commas (default: those of the quality);
- ``picture``: also draws this PNG file next to the README, quality against stored bytes of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.common.comparison import comparison_table
from recipes.common.plot import TITLES, quality_size_plot
from recipes.common.recipe import Recipe
from recipes.common.results import Record, read_results
from recipes.common.rows import FILE, read_file
from recipes.common.table import RECIPE_COLUMNS, chosen_columns, markdown_table, records_of, update_readme
from shared_embeddings.errors import UserError


def update_tables(recipe: Recipe, results: Path, readme: Path) -> str:
    """Write all tables of a recipe into a README and draw its picture.

    Args:
        recipe: whose tables they are.
        results: a ``results.jsonl`` or a folder with one; without it, no row was run.
        readme: gets the tables; the figure is next to it.

    Returns:
        How many rows are measured.

    Raises:
        UserError: the recipe has no tables, or a file cannot be used.
    """
    tables = read_file(recipe.folder / FILE).get("readme", [])
    if not tables:
        raise UserError(f"{recipe.name} has no tables that this command can make; eval.sh makes them")
    found = read_results(results) if results.exists() else []
    for table in tables:
        records = records_of(recipe.rows, found, table.get("rows", "*"))
        if table.get("from_scratch"):
            records = [record for record in records if not _starts_trained(recipe, record)]
        update_readme(readme, table["marker"], _text(recipe, table, records))
        measured = [record for record in records if record["metrics"]]
        if table.get("picture") and measured:
            quality_size_plot(measured, readme.with_name(table["picture"]), table["quality"], recipe.title)
    known = sum(record["row"] in recipe.rows for record in found)
    return f"{readme}: {known} of {len(recipe.rows)} rows measured"


def _starts_trained(recipe: Recipe, record: Record) -> bool:
    """Whether a row starts from a trained one."""
    return recipe.rows[record["row"]].teacher is not None


def _text(recipe: Recipe, table: dict[str, Any], records: Sequence[Record]) -> str:
    """The Markdown of one table."""
    kind = table.get("table", "results")
    if kind == "headlines":
        from recipes.headlines.evaluate import headline_table

        return headline_table(recipe, records)
    if kind == "comparison":
        quality = table["quality"]
        return f"{TITLES[quality]}:\n\n{comparison_table(records, quality)}"
    columns = chosen_columns(table["columns"]) if "columns" in table else RECIPE_COLUMNS[table["quality"]]
    return markdown_table(records, columns)
