"""Update the tables of README.md: ``make readme``, after a method or the results of decoders changed."""

from pathlib import Path

from recipes.common.table import update_readme
from recipes.shrink_a_model.models import decoder_summary
from shared_embeddings.cli.main import methods_table

README = Path(__file__).parents[1] / "README.md"

update_readme(README, "methods", methods_table())
update_readme(README, "decoder", decoder_summary())
