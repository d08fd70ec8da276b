"""Update all that is generated from results: ``make readme``, after methods or results changed."""

from pathlib import Path

from recipes import papers
from recipes.common.recipe import FILE, find_recipe, read_file, recipe_names
from recipes.common.results import FILE as RESULTS
from recipes.common.table import update_readme, update_tables
from recipes.report import CLAIMS_PAGE, claims_table
from recipes.shrink_a_model import summary
from shared_embeddings.cli.catalog import methods_table

ROOT = Path(__file__).parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"

models = summary.results_by_row()
update_readme(README, "front", summary.front(models))
update_readme(README, "gains", summary.gains(models))
update_readme(DOCS / "deployment.md", "runtimes", summary.runtimes(models))
summary.draw_front(models)
update_readme(DOCS / "methods.md", "methods", methods_table())
for recipe in map(find_recipe, recipe_names()):
    if read_file(recipe.folder / FILE).get("readme"):
        print(update_tables(recipe, recipe.folder / RESULTS, recipe.page))
update_readme(papers.README, papers.MARKER, papers.coverage_tables(papers.read_papers()))
update_readme(CLAIMS_PAGE, "claims", claims_table())
