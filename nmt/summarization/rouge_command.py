"""The command ``onmt_rouge``: its options, and what it prints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

from nmt.summarization.rouge import PRESETS, score_texts
from nmt.summarization.rouge_tokens import TOKENS, read_exceptions, read_texts
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption


def make_parser() -> Parser:
    """The options; one that is not given has no attribute where the preset decides."""
    parser = Parser("onmt_rouge", description="ROUGE-1, ROUGE-2 and ROUGE-L of summaries, one text a line")
    add = parser.add_argument
    add(
        "--candidates",
        "-candidates",
        type=PathOption.FILE,
        required=True,
        metavar="FILE",
        help="what to score",
    )
    add(
        "--references",
        "-references",
        type=PathOption.FILE,
        nargs="+",
        required=True,
        metavar="FILE",
        help="one reference per text in each file; an empty line where a text has fewer",
    )
    add(
        "--preset",
        "-preset",
        choices=PRESETS,
        default="f1",
        help="f1; or duc2004: recall of the first 75 bytes (default: %(default)s)",
    )
    add(
        "--exceptions",
        "-exceptions",
        type=PathOption.FILE,
        nargs="+",
        default=[],
        metavar="FILE",
        help="WordNet's lists of irregular forms (*.exc), as ROUGE-1.5.5 uses for stemming",
    )
    add("--json", "-json", action="store_true", help="print all measures and settings as JSON")
    preset = parser.add_argument_group("in place of the preset's", argument_default=argparse.SUPPRESS)
    add = preset.add_argument
    add("--bytes", "-bytes", dest="cut_bytes", type=int, metavar="N", help="cut candidates to so many bytes")
    add("--tokens", "-tokens", choices=TOKENS, help="ascii as ROUGE-1.5.5, or for other languages")
    add("--no_stem", "-no_stem", dest="stemming", action="store_false", help="leave English suffixes on")
    add("--seed", "-seed", type=int, metavar="N", help="of the bootstrap")
    return parser


def main(arguments: Sequence[str]) -> None:
    """Run ``onmt_rouge``."""
    options = make_parser().parse_args(arguments)
    overrides = ("cut_bytes", "tokens", "stemming", "seed")
    changed = {name: getattr(options, name) for name in overrides if name in options}
    settings = replace(PRESETS[options.preset], **changed)
    candidates = read_texts(options.candidates)
    references = [read_texts(path) for path in options.references]
    report = score_texts(candidates, references, settings, read_exceptions(options.exceptions))
    print(json.dumps(report.as_json(), indent=2) if options.json else report)
