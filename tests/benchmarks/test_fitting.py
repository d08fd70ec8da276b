"""The benchmark of fits: equal sizes, a table of them, and going on where a run was interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shared_embeddings as se
from benchmarks import fitting
from benchmarks.measuring import read_record, save_record
from recipes.common.tools import run_main

WORDS = [f"w{number}" for number in range(400)]


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    """Arguments for a text of up to 400 words at a quarter of their size."""
    text = tmp_path / "text.txt"
    order = torch.randint(0, 400, (300, 8)).square() // 400
    text.write_text("\n".join(" ".join(WORDS[index] for index in line) for line in order.tolist()) + "\n")
    small = ["--dim", "16", "--epochs", "1", "--compression", "4"]
    return ["--text", str(text), *small, "--output", str(tmp_path / "numbers.jsonl")]


def fits(asked: list[str]) -> dict[str, dict]:
    """What the output holds, by method."""
    return {fit["method"]: fit for fit in read_record(Path(asked[-1]), "fitting", "fits")["fits"]}


def test_options_meet_the_budget_for_every_method_that_can() -> None:
    table = torch.randn(2000, 64)
    found = fitting.suggested(table, 2000 * 64 // 8, se.methods())
    assert set(found) == set(se.methods()) - {"standard"}
    for method, options in found.items():
        assert "random_classes" not in options
        given = {"random_classes": True} if method == "uncle" else {}
        count = se.num_parameters(method, num_embeddings=2000, embedding_dim=64, **options, **given)
        assert count <= 2000 * 64 // 8


def test_fits_are_kept_and_not_done_again(asked: list[str], monkeypatch, capsys) -> None:
    fitting.main([*asked[:-2], "--methods", "projective", *asked[-2:]])
    first = fits(asked)["projective"]

    done: list[str] = []
    fit = se.fit

    def counted(method: str, *arguments, **options):
        done.append(method)
        if len(done) == 2:
            raise KeyboardInterrupt
        return fit(method, *arguments, **options)

    monkeypatch.setattr(fitting.se, "fit", counted)
    chosen = ["--methods", "projective", "tensor_train", "adaptive", "standard"]
    again = [*asked[:-2], *chosen, *asked[-2:]]
    assert run_main("fitting", fitting.main, again) == 130
    assert set(fits(asked)) == {"projective", done[0]}

    fitting.main(again)
    assert sorted(done) == sorted(["tensor_train", "adaptive", done[1]])
    assert set(fits(asked)) == {"projective", "tensor_train", "adaptive"}
    assert "standard is skipped" in capsys.readouterr().err
    assert fits(asked)["projective"] == first
    losses = [fit["loss"] for fit in read_record(Path(asked[-1]), "fitting", "fits")["fits"]]
    assert losses == sorted(losses)


def test_fits_of_other_sizes_are_not_mixed(asked: list[str], capsys) -> None:
    fitting.main([*asked[:-2], "--methods", "projective", *asked[-2:]])
    before = Path(asked[-1]).read_text()
    asked[asked.index("--compression") + 1] = "5"
    assert run_main("fitting", fitting.main, asked) == 2
    assert "compression is 4 in this file but 5 now" in capsys.readouterr().err
    assert Path(asked[-1]).read_text() == before


def test_the_table_shows_sizes_in_bits_of_eight() -> None:
    report = {
        "method": "funnel",
        "parameters": 1234,
        "stored_bits": 8192 * 3,
        "loss": 0.12345,
        "relative_error": 0.5,
        "weighted_error": 0.25,
        "seconds": 1.6,
    }
    assert fitting.as_table([report]).splitlines()[-1] == (
        "| funnel | 1,234 | 3 | 0.123 | 0.500 | 0.250 | 2 |"
    )


def test_fits_to_a_drawn_table_are_measured_apart(tmp_path: Path, capsys) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- BEGIN large fits -->\n<!-- END large fits -->\n")
    output = tmp_path / "large.jsonl"
    asked = ["--size", "600x32", "--compression", "4", "--methods", "projective", "standard"]
    where = ["--output", str(output), "--readme", str(readme)]
    fitting.main([*asked, *where])
    assert "standard is skipped" in capsys.readouterr().err
    (found,) = read_record(output, "large fits", "fits")["fits"]
    assert found["method"] == "projective" and found["peak_tables"] > 0
    assert 4 <= found["compression"] < 5
    assert "| projective | 4." in readme.read_text()
    record = read_record(output, "large fits", "fits")
    save_record(output, "large fits", {**record, "fits": [{**found, "seconds": 71}]})
    fitting.main([*asked, *where])
    assert "| 71 |" in readme.read_text()


@pytest.mark.parametrize("wrong", ["640", "0x640", "axb", "1x2x3"])
def test_what_is_no_size_is_refused(wrong: str, capsys) -> None:
    with pytest.raises(SystemExit) as error:
        fitting.main(["--size", wrong])
    assert error.value.code == 2 and "--size" in capsys.readouterr().err
