"""Update all that is generated from results: ``make readme``, after methods or results changed."""

from pathlib import Path

from recipes.claims import TARGET, claims_table
from recipes.common.table import update_readme
from recipes.shrink_a_model.models import SUMMARY_PICTURE, decoder_summary, draw_summary
from shared_embeddings.cli.catalog import methods_table

README = Path(__file__).parents[1] / "README.md"

update_readme(README, "methods", methods_table())
update_readme(README, "decoder", decoder_summary())
draw_summary(SUMMARY_PICTURE)
update_readme(TARGET, "claims", claims_table())
