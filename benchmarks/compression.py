"""Measures what trained models keep when their tables are compressed to the same numbers of bytes.

At every ratio, all candidates of `compress` and some other methods are fitted, and nothing is trained
afterwards; the plain table in 16, 8 and 4 bits is there for comparison. The share of predictions in the texts
that a model keeps is measured, too, and their divergence: without validation data, `compress` chooses by it.
Trials that the ``--output`` file already has are skipped, so that interrupted commands can be resumed.

    python -m benchmarks.compression --model best.pt --validation ptb.test.txt --text ptb.train.txt \
        --output benchmarks/results.jsonl --marker 'compression ptb'
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.measuring import Record, earlier_record, markdown, parser_of, publish, save_record
from recipes.common.tools import run_main
from shared_embeddings.compress.measure import Comparison, Retention
from shared_embeddings.compress.options import CompressOptions
from shared_embeddings.compress.search import Trial, attempt, candidates
from shared_embeddings.compress.session import Session
from shared_embeddings.compress.sizing import Target
from shared_embeddings.modules.quantized import DEFAULT_CODEC
from shared_embeddings.spec import Candidate
from shared_embeddings.utils.paths import existing_file, existing_path

RATIOS = (4.0, 8.0, 16.0, 32.0)
PLAIN = [("standard", Candidate({}, store)) for store in ("fp16", "int8")]
# Methods that `compress` does not try by default.
OTHERS = [
    ("structured", Candidate({}, "fp16")),
    ("compositional_code", Candidate({}, "fp16")),
    ("group_reduce", Candidate({}, "int8")),
]


def measured(trial: Trial, predictions: Retention) -> dict[str, Any]:
    """The numbers of a trial, and what it keeps of the predictions of the original."""
    quality, retention = trial.quality, trial.retention
    assert quality is not None and retention is not None
    return {
        "bytes": trial.sizes.after,
        "smaller": trial.sizes.smaller,
        "bits": 32 / trial.sizes.smaller,
        "error": trial.relative_error,
        "measure": quality.measure,
        "how": re.sub(r"\S*/", "", quality.how),  # without folders of this machine
        "before": quality.before,
        "after": quality.after,
        "kept": -1.0 if retention.share is None else retention.share,
        "predictions": predictions.share,
        "kl": predictions.kl,
    }


def as_table(record: Record) -> str:
    """Format the trials as a Markdown table, by size and quality, with what `compress` chooses below."""
    measured = [trial for trial in record["trials"] if "kept" in trial]
    measure, before = measured[0]["measure"], measured[0]["before"]
    titles = ["method", "numbers in", "asked", "smaller", "bits per weight", "relative error"]
    rows = [
        [
            name_of(trial),
            trial["store"],
            "–" if trial["ratio"] is None else f"{trial['ratio']:g}x",
            *(f"{trial['smaller']:.1f}x", f"{trial['bits']:.2f}"),
            *(f"{trial['error']:.3f}", f"{trial['after']:.2f}"),
            *(_percent(trial["kept"]), _percent(trial.get("predictions"))),
        ]
        for trial in sorted(measured, key=lambda trial: (trial["ratio"] or 0, -trial["kept"]))
    ]
    title = (
        f"{record['title']}: {measure} {before:.2f} before compression. "
        f"Words are counted in {' and '.join(record['texts'])}."
    )
    table = markdown([*titles, measure, "kept", "predictions kept"], rows, names=2)
    return "\n".join([title, "", table, "", *choices(measured)])


def name_of(trial: Record) -> str:
    """The method of a trial and its options."""
    codec = {"codec": DEFAULT_CODEC} if trial["method"] == "quantized" else {}
    return ", ".join([trial["method"], *map(str, {**codec, **trial["options"]}.values())])


def choices(measured: Sequence[Record]) -> Iterator[str]:
    """For every ratio, what `compress` chooses by quality and by predictions, and the best trial."""
    tried = [(method, dict(options), store) for method, (options, store) in candidates()]
    for ratio in sorted({trial["ratio"] for trial in measured} - {None}):
        of_ratio = [trial for trial in measured if trial["ratio"] == ratio]
        possible = [row for row in of_ratio if (row["method"], row["options"], row["store"]) in tried]
        chosen = {
            key: min(possible, key=lambda trial: (loss(trial), trial["bytes"]))
            for key, measure, loss in (
                ("quality", "kept", lambda trial: -trial["kept"]),
                # By the divergence; earlier results have a distance or only the share.
                (
                    "predictions",
                    "predictions",
                    lambda row: row.get("kl", row.get("distance", -row["predictions"])),
                ),
            )
            if all(measure in trial for trial in possible)
        }
        named = [f"{name_of(trial)} by {key} ({_percent(trial['kept'])})" for key, trial in chosen.items()]
        best = max(of_ratio, key=lambda trial: trial["kept"])
        yield (
            f"- At {ratio:g}x, `compress` chooses {' and '.join(named)}; the best row is {name_of(best)} "
            f"({_percent(best['kept'])})."
        )


def _percent(share: float | None) -> str:
    """A share in percent; a dash if it was not measured."""
    return "–" if share is None else f"{100 * share:.1f}%"


def main(arguments: Sequence[str]) -> None:
    """Run the trials that the output file does not have yet, and publish."""
    parser = parser_of("benchmarks.compression", __doc__)
    parser.add_argument("--model", type=existing_path, required=True)
    parser.add_argument("--title", help="what the model is, for the table")
    parser.add_argument("--text", type=existing_file, nargs="+", required=True, help="to count words in")
    parser.add_argument("--validation", type=existing_path)
    parser.add_argument("--validation-source", type=existing_file)
    parser.add_argument("--validation-target", type=existing_file)
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--marker", default="compression", help="name of the results (default: compression)")
    options = parser.parse_args(arguments)
    compared = CompressOptions(
        model=options.model,
        compare=True,
        size="8x",  # each trial has its own
        text=tuple(options.text),
        validation=options.validation,
        validation_source=options.validation_source,
        validation_target=options.validation_target,
    )
    texts = [path.name for path in options.text]
    new: Record = {"title": options.title or options.model.name, "texts": texts, "trials": []}
    record = earlier_record(options.output, options.marker) or new
    session = Session(compared)
    # Translations of the model, also for the others.
    predictions = Comparison(session.trained, None, options.text, seed=0)
    # A plain table has its own ratio.
    trials: list[tuple[str, Candidate, float | None]] = [(*plain, None) for plain in PLAIN]
    for ratio in options.ratios:
        trials += [(*combination, ratio) for combination in (*candidates(), *OTHERS)]
    for method, candidate, ratio in trials:
        key = {"method": method, "options": dict(candidate.options), "store": candidate.store, "ratio": ratio}
        if any(all(earlier[name] == key[name] for name in key) for earlier in record["trials"]):
            continue
        print(*key.values(), file=sys.stderr, flush=True)
        trial = attempt(session, method, candidate, None if ratio is None else Target(ratio))
        is_measured = trial.retention is not None
        numbers = measured(trial, predictions.retention()) if is_measured else {"impossible": trial.reason}
        record["trials"].append({**key, **numbers})
        if options.output is not None:
            save_record(options.output, options.marker, record)
    publish(record, as_table(record), options.marker, options)


if __name__ == "__main__":
    raise SystemExit(run_main("compression", main))
