"""The quickstart: its corpus, and its driver with replacements for OpenNMT's commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from recipes.common.recipe import find_recipe
from recipes.common.results import REPOSITORY, find_result, read_results
from recipes.common.tools import run_main
from recipes.quickstart import corpus, run
from recipes.quickstart.corpus import (
    KINDS,
    Speech,
    Template,
    WordTokenizer,
    clean,
    covered_languages,
    make_corpus,
    read_templates,
    say,
)
from recipes.translation.subwords import JOINER, joiner
from recipes.translation.train import corpus_scores
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import locked

RECIPE = find_recipe("quickstart")
COUNTS = {"embedding": 1000, "stored_bits": 160_000, "total": 5000, "compression": 4.0, "config": {"seed": 1}}
SMALL = {"--train": "40", "--valid": "4", "--test": "6", "--steps": "30", "--rows": "standard,projective"}
FAKE_COMMANDS = {
    "onmt_build_vocab": """
config = yaml.safe_load(open(sys.argv[2]))
corpus = config["data"]["train"]
words = [word for side in ("path_src", "path_tgt") for word in open(corpus[side]).read().split()]
open(config["src_vocab"], "w").writelines(f"{word}\\t1\\n" for word in sorted(set(words)))
""",
    "onmt_train": """
config = yaml.safe_load(open(sys.argv[2]))
folder = os.path.dirname(config["save_model"])
os.makedirs(folder)
open(os.path.join(folder, "started"), "a").write("x")
zipfile.ZipFile(f"{config['save_model']}_step_{config['train_steps']}.pt", "w").writestr("weights", "")
""",
    "onmt_average_models": """
open(sys.argv[-1], "w").close()
""",
    "onmt_translate": """
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
open(options["-output"], "w").write(open(options["-src"].removesuffix("en") + "de").read())
open(yaml.safe_load(open(options["-config"]))["log_file"], "w").write("Tokens per second: 123.4")
""",
}


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with replacements for OpenNMT's commands, which the driver uses."""
    build = pytest.importorskip("nmt.models")
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, code in FAKE_COMMANDS.items():
        path = folder / name
        path.write_text(f"#!{sys.executable}\nimport os, sys, yaml, zipfile\n{code}")
        path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(build, "describe_checkpoint", lambda path: dict(COUNTS))
    return folder


def start(tmp_path: Path, *options: str) -> int:
    """Run the recipe with small settings, except those in `options`."""
    settings = {**SMALL, "--output": str(tmp_path / "out")}
    defaults = [word for name, value in settings.items() if name not in options for word in (name, value)]
    before = signal.getsignal(signal.SIGTERM)
    try:
        return run_main("quickstart", partial(run.main, RECIPE), [*defaults, *options])
    finally:
        signal.signal(signal.SIGTERM, before)


def trainings(tmp_path: Path, row: str) -> int:
    """How often a row was trained since its folder was made."""
    return (tmp_path / "out" / "en-de" / row / "checkpoints" / "started").stat().st_size


def test_complete_run_then_nothing_to_do(
    tmp_path: Path, commands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(tmp_path) == 0
    folder = tmp_path / "out" / "en-de"
    records = read_results(folder)
    assert [record["row"] for record in records] == ["projective", "standard"]
    assert records[0]["metrics"]["bleu"] == pytest.approx(100.0)
    assert records[0]["metrics"]["tokens_per_second"] == 123.4
    assert records[0]["config"]["embedding"]["method"] == "projective"
    assert (folder / "quality_size.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert printed.index("| standard ") < printed.index("| projective ")
    assert "reference" in printed and "quality_size.png" in printed

    assert start(tmp_path) == 0
    assert "projective: up to date" in capsys.readouterr().out
    assert trainings(tmp_path, "projective") == 1


@pytest.mark.slow
def test_changed_steps_train_again_and_fresh_starts_over(tmp_path: Path, commands: Path) -> None:
    assert start(tmp_path) == 0
    record = find_result(tmp_path / "out" / "en-de", "standard")
    (commands / "onmt_build_vocab").unlink()
    # Dates are in seconds, and both runs may end in the same one.
    assert record
    results = tmp_path / "out" / "en-de" / "results.jsonl"
    results.write_text(results.read_text().replace(record["date"], "2000-01-01T00:00:00+00:00"))
    assert start(tmp_path, "--steps", "40") == 0
    assert (tmp_path / "out" / "en-de" / "standard" / "checkpoints" / "model_step_40.pt").exists()
    changed = find_result(tmp_path / "out" / "en-de", "standard")
    assert changed and changed["date"] >= record["date"]
    assert changed["data_checksum"] == record["data_checksum"]
    # Starting over needs the command that was removed.
    assert start(tmp_path, "--fresh") == 2


@pytest.mark.slow
def test_failures_show_the_end_of_the_log_and_finished_trainings_survive(
    tmp_path: Path, commands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def replace(name: str, code: str) -> None:
        python = (commands / "onmt_average_models").read_text().splitlines()[0]
        (commands / name).write_text(f"{python}\n{code}\n")

    working = {name: (commands / name).read_text() for name in FAKE_COMMANDS}
    replace("onmt_train", "import sys\nprint('rank is 0')\nsys.exit(2)")
    assert start(tmp_path) == 2
    errors = capsys.readouterr().err
    assert "  | rank is 0" in errors and "Traceback" not in errors
    assert "onmt_train failed with status 2" in errors.splitlines()[-1]
    (commands / "onmt_train").write_text(working["onmt_train"])
    replace("onmt_translate", "raise SystemExit('no such model')")
    assert start(tmp_path) == 2
    assert "no such model" in capsys.readouterr().err
    (commands / "onmt_translate").write_text(working["onmt_translate"])
    assert start(tmp_path) == 0
    assert trainings(tmp_path, "projective") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "el"], "num2words"),
        (["--target", "en"], "choose two languages"),
        (["--rows", "standard,magic"], "no row 'magic'"),
        ([], "another process is running"),
    ],
)
def test_user_errors_are_one_line(
    tmp_path: Path, commands: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with locked(tmp_path / "out" / ("other" if options else "en-de") / "lock"):
        assert start(tmp_path, *options) == 2
    errors = capsys.readouterr().err
    assert message in errors and len(errors.splitlines()) == 1


SLEEPER = """
import os, time
print(os.getpid(), flush=True)
time.sleep(60)
"""
# Runs two rows of which one sleeps and the other one fails, or sleeps, too.
ROWS = """
import sys
from pathlib import Path
from recipes.common.recipe import Recipe, Row
from recipes.common.tools import run_command, run_main
from recipes.quickstart import run

folder, second = Path(sys.argv[1]), sys.argv[2]
recipe = run.Quickstart(folder, output=folder)
rows = [Row(name=name, embedding={}) for name in ("sleeper", second)]

def work(recipe, row):
    run_command("python", [folder / f"{row.name}.py"], folder / f"{row.name}.log")

sys.exit(run_main("quickstart", lambda _: run.run_rows(recipe, rows, work, 2), []))
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["failing", "SIGINT", "SIGTERM"])
def test_failures_and_signals_stop_all_rows(tmp_path: Path, end: str) -> None:
    log = tmp_path / "sleeper.log"
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    (tmp_path / "failing.py").write_text(
        f"import os, sys, time\nwhile not os.path.exists({str(log)!r}): time.sleep(0.05)\n"
        "time.sleep(1)\nsys.exit(3)"
    )
    second = "failing" if end == "failing" else "sleeper"
    command = [sys.executable, "-c", ROWS, str(tmp_path), second]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if end != "failing":
        process.send_signal(getattr(signal, end))
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == {"failing": 2, "SIGINT": 130, "SIGTERM": 143}[end]
    wanted = "failed with status 3" if end == "failing" else "run the same command again to resume"
    assert wanted in errors.splitlines()[-1]
    for number in log.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(number), 0)


def test_side_by_side_shows_right_and_wrong_ones() -> None:
    sources, references = ["a", "b", "c", "d"], ["A", "B", "C", "D"]
    text = run.side_by_side(sources, references, {"standard": ["A", "B", "C", "x"]}, count=2)
    blocks = text.split("\n\n")
    assert [block.splitlines()[0].split() for block in blocks] == [["source", "a"], ["source", "d"]]
    assert blocks[0].splitlines()[2] == "standard  =A"
    assert blocks[1].splitlines()[2] == "standard   x"


def test_languages_without_spaces_are_scored_by_character() -> None:
    assert "tok:char" in corpus_scores(["3月です"], ["3月だ"], "ja")["bleu_signature"]
    assert "tok:13a" in corpus_scores(["März"], ["März"], "de-AT")["bleu_signature"]


def test_quickstart_rows_differ_only_in_their_embedding() -> None:
    rows = run.Quickstart(RECIPE.folder).rows_named(None)
    assert rows[0].name == "standard" and len(rows) >= 4
    assert {row.name for row in rows} == set(RECIPE.rows)
    assert all(row.train == RECIPE.row("standard").train for row in rows)


@pytest.mark.slow
def test_real_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("nmt.cli")
    status = start(tmp_path, "--rows", "projective", "--train", "60", "--steps", "2")
    assert status == 0, capsys.readouterr().err
    (record,) = read_results(tmp_path / "out" / "en-de")
    assert record["counts"]["compression"] > 1
    assert record["metrics"]["tokens_per_second"] > 0


# The corpus

SIZES = {"train": 300, "valid": 30, "test": 30}


@pytest.mark.slow_except("en-de", "de_AT-en-GB", "ru-ja")
@pytest.mark.parametrize(
    ("source", "target"),
    [("en", "de"), ("en", "fr"), ("de", "es"), ("de_AT", "en-GB"), ("ru", "ja"), ("fa", "tr"), ("kk", "nb")],
)
def test_splits_are_disjoint_on_both_sides_clean_and_seeded(source: str, target: str) -> None:
    parts = make_corpus(source, target, SIZES)
    assert {part: len(pairs) for part, pairs in parts.items()} == SIZES
    for side in (0, 1):
        texts = [pair[side] for pairs in parts.values() for pair in pairs]
        assert len(set(texts)) == len(texts)
        assert all(text == clean(text) and text for text in texts)
    if target == "de":
        again, other = (make_corpus(source, target, SIZES, seed) for seed in (1, 2))
        assert again == parts != other


def test_hand_checked_sentences() -> None:
    """Every template with the same facts, against sentences written by hand."""
    english, german, french, spanish = (Speech(name) for name in ("en", "de", "fr", "es"))
    day = (2021, 8, 18)
    assert say(english, "full_date", day) == "Wednesday, August 18, 2021"
    assert say(german, "full_date", day) == "Mittwoch, 18. August 2021"
    assert say(french, "long_date", day) == "18 août 2021"
    assert say(spanish, "day_of_year", day) == "18 de agosto"
    assert say(english, "time", (15, 5)) == "3:05 PM"
    assert say(german, "time", (15, 5)) == "15:05"
    assert say(english, "money", (7500, "CHF")) == "7,500 Swiss francs"
    assert say(german, "money", (7500, "CHF")) == "7.500 Schweizer Franken"
    assert say(french, "money_in_words", (82, "EUR")) == "quatre-vingt-deux euros"
    assert say(german, "ago", (3, "week")) == "vor 3 Wochen"
    assert say(english, "ago", (20, "month")) == "20 months ago"
    assert say(english, "ahead", (15, "day")) == "in 15 days"
    assert say(spanish, "speed", (47, "speed-kilometer-per-hour")) == "47 kilómetros por hora"
    assert say(german, "ordinal", (17,)) == "siebzehnte"
    assert say(english, "sum", (17, 5)) == "seventeen + five = twenty-two"
    assert say(english, "territories", ("IE", "NO", "TM")) == "Ireland, Norway, and Turkmenistan"
    assert say(german, "territories", ("IE", "NO", "TM")) == "Irland, Norwegen und Turkmenistan"
    assert [say(english, "weekday", (day,)) for day in (0, 6)] == ["Monday", "Sunday"]
    # Numbers that end in 1 agree with a gender.
    assert not any(count % 10 == 1 for count in corpus.COUNTS)


def test_every_supported_language_generates() -> None:
    assert len(covered_languages()) > 40
    for language in covered_languages():
        speech = Speech(language)
        assert say(speech, "number", (42,)) and speech.listing(["A", "B", "C"])
        assert say(speech, "time", (15, 5))


def test_impossible_corpora_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [Template({"month": "month"}, {"en": "It is {month}.", "de": "Es ist {month}."})]
    monkeypatch.setattr(corpus, "read_templates", lambda: few)
    for target, message in (
        ("de", "no new one after 12"),
        *((language, "'(el|../de|)'.* supported languages: am, ar, az") for language in ("el", "../de", "")),
    ):
        with pytest.raises(UserError, match=message):
            make_corpus("en", target, SIZES)


def test_templates_have_all_languages_slots_and_kinds() -> None:
    templates = read_templates()
    assert all(set(template.texts) == {"en", "de", "fr", "es"} for template in templates)
    assert {kind for template in templates for kind in template.slots.values()} == set(KINDS)
    for template in templates:
        slots = ["{" + slot + "}" for slot in template.slots]
        assert all(text.count(slot) == 1 for text in template.texts.values() for slot in slots)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--train", "20", "--valid", "2", "--test", "2", "--output"]
    assert run_main("corpus", corpus.main, [*arguments, str(tmp_path / "made")]) == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    assert sorted(files) == ["test.de", "test.en", "train.de", "train.en", "valid.de", "valid.en"]
    assert run_main("corpus", corpus.main, [*arguments, str(tmp_path / "made")]) == 2
    assert run_main("corpus", corpus.main, [*arguments, str(tmp_path / "made"), "--force"]) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()} == files
    capsys.readouterr()
    assert len(files["train.en"].splitlines()) == 20


@pytest.mark.slow_except("en")
@pytest.mark.parametrize("language", ["en", "de", "fr", "fa", "ja", "th", "te"])
def test_detokenization_restores_the_sentence(language: str) -> None:
    tokenizer = WordTokenizer(language)
    for text, _ in make_corpus(language, "en" if language != "en" else "de", {"train": 100})["train"]:
        words = tokenizer.split(text)
        assert joiner("words", language)(" ".join(words)) == text
        assert all(word and not any(character.isspace() for character in word) for word in words)


def test_tokenization_of_a_sentence() -> None:
    words = WordTokenizer("de").split("Am 9. Januar um 08:45 Uhr (endlich).")
    assert [word.replace(JOINER, "_") for word in words] == (
        ["Am", "9.", "Januar", "um", "08", "_:", "_45", "Uhr", "(", "_endlich", "_)", "_."]
    )
    assert WordTokenizer("ja").split("3月") == ["3", JOINER + "月"]
    assert clean("\u200f3:45\u202fPM\u00a0 l\u2019an\n") == "3:45 PM l'an"
