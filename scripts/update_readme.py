"""Update the table of methods in README.md: ``make readme``, after a method changed."""

from pathlib import Path

from shared_embeddings.cli.main import methods_table
from shared_embeddings.utils.files import write_text

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- BEGIN methods -->\n", "\n<!-- END methods -->"

before, rest = README.read_text(encoding="utf-8").split(BEGIN)
write_text(README, f"{before}{BEGIN}{methods_table()}{END}{rest.split(END)[1]}")
