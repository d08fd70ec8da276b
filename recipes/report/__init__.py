"""The report: every result of the recipes beside the papers' figures, as Markdown and as one HTML page."""
