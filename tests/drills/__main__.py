"""Run drills by the names of their modules: ``python -m tests.drills [NAME …] [--tries N] [--write]``.

A module in this folder with a list ``DRILLS`` is a set of drills. Its docstring starts its section in
README.md, where ``--write`` replaces the rows of the drills that were run.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

from shared_embeddings.utils.command_line import Parser, positive
from tests.drills import runner

NAMES = ("commands", "planted", "training")


def main() -> int:
    """Run the command line; returns 1 if any try had an unexpected outcome."""
    parser = Parser("drills", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--tries", type=positive, help="tries per drill (default: set by each drill)")
    parser.add_argument("--seed", type=int, default=1, help="random seed (default: %(default)s)")
    parser.add_argument("--jobs", type=positive, default=1, help="tries in parallel (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="run drills whose name contains this text")
    parser.add_argument("--write", action="store_true", help="update the counts in tests/drills/README.md")
    given = parser.parse_args()
    for name in given.names:
        if name not in NAMES:
            parser.error(f"unknown name {name!r}; choose from {', '.join(NAMES)}")
    failed = False
    for name in given.names or NAMES:
        module = importlib.import_module(f"tests.drills.{name}")
        chosen = [drill for drill in module.DRILLS if given.only in drill.name]
        with tempfile.TemporaryDirectory(prefix=f"drill-{name}-") as folder:
            results = runner.perform(chosen, Path(folder), given.seed, given.tries, given.jobs)
        print("\n".join([*runner.HEAD, *runner.rows(results).values()]))
        if given.write:
            runner.write_results(name.replace("_", " ").capitalize(), module.__doc__.strip(), results)
        failed = failed or any(result.others for result in results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
