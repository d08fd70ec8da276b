"""Embedding distillation: initialization from the teacher, both losses, resuming, and errors."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shared_embeddings as se
from nmt.checkpoints import read_checkpoint
from nmt.embeddings import shared_embeddings_of, words_module
from nmt.models import build_from_checkpoint
from nmt.options import parse_mapping
from nmt.train.embeddings import token_counts
from nmt.vocabulary import vocabulary_counts
from shared_embeddings.compress.distillation import parse_distillation
from shared_embeddings.utils.errors import UserError
from tests.nmt.conftest import Host, Patch, Trained, nearest, run, weights
from tests.nmt.test_training import METHODS

STANDARD = METHODS["standard"]
PROJECTIVE = {"method": "projective", "rank": 4}
GROUPS = {"method": "group_reduce", "num_groups": 3, "min_rank": 2}
# A learning rate of zero, so that the saved parameters are the initial ones.
STILL = {"train_steps": 1, "learning_rate": 0.0}


@pytest.fixture(autouse=True)
def fit_steps(monkeypatch: Patch) -> list[int | None]:
    """A few steps of gradient descent for fits that set no number; records the numbers that they set."""
    asked, fit = [], se.fit

    def short(*arguments: Any, steps: int | None = None, **options: Any) -> Any:
        asked.append(steps)
        return fit(*arguments, steps=steps or 60, **options)

    monkeypatch.setattr(se, "fit", short)
    return asked


@pytest.fixture
def teacher(trained: Trained) -> Path:
    """A trained model with full tables."""
    return trained(embedding=STANDARD)[1]


def distilled(host: Host, teacher: Path, embedding: dict[str, Any] | None, **options: Any) -> Path:
    """Train a student; keys of the option may be given as ``d_KEY``."""
    keys = {name[2:]: options.pop(name) for name in list(options) if name.startswith("d_")}
    settings = {"embedding_distillation": {"teacher": str(teacher), **keys}}
    return host.train("student", embedding=embedding, resume="overwrite", **settings, **options)


def network(path: Path) -> dict[str, torch.Tensor]:
    """The weights outside the word embeddings."""
    return {name: tensor for name, tensor in weights(path).items() if "emb_luts.0" not in name}


def table(path: Path) -> torch.Tensor:
    """The target table of a checkpoint."""
    model, *_ = build_from_checkpoint(str(path))
    lookup = words_module(model, "target")
    return lookup.weight.detach() if isinstance(lookup, torch.nn.Embedding) else lookup.table().detach()


def svd(full: torch.Tensor, rank: int) -> torch.Tensor:
    """The best approximation of a table at a rank; its padding row (id 1) is zero before and after."""
    full = full.clone()
    full[1] = 0.0
    return nearest(full, rank)


@pytest.mark.slow_except("standard")
@pytest.mark.parametrize("embedding", [STANDARD, None], ids=["standard", "plain"])
def test_student_starts_from_the_teacher(embedding: Any, trained: Trained, host: Host) -> None:
    _, teacher = trained(embedding=embedding)
    log = host.folder / "log"
    student = distilled(host, teacher, PROJECTIVE, log_file=str(log), **STILL)
    assert "dropped" not in log.read_text()
    bias = build_from_checkpoint(str(student))[0].generator.embedding.output_bias()
    if embedding is None:
        torch.testing.assert_close(bias[2:], weights(teacher)["generator.bias"][2:], rtol=0, atol=1e-6)
    else:
        assert bias is None
    torch.testing.assert_close(table(student), svd(table(teacher), 4), rtol=1e-4, atol=1e-5)
    before = network(teacher)
    for name, tensor in network(student).items():
        assert torch.equal(tensor, before[name]), name
    assert len(host.translate(student)) == 7


# The example of ALONE does not fit a table of 88 words in two steps.
FITTED = METHODS | {"alone": {**METHODS["alone"], "base_dim": 16, "hidden_dim": 24, "codebook_size": 8}}


@pytest.mark.slow_except("adaptive")
@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("standard", "projective")])
def test_every_method(method: str, trained: Trained, host: Host) -> None:
    """Fitted, trained, saved with its own sizes, and loaded again."""
    _, teacher = trained(embedding=STANDARD)
    student = distilled(host, teacher, FITTED[method], train_steps=2, d_alpha=0.5)
    model, _, options, checkpoint = build_from_checkpoint(str(student))
    (embedding,) = shared_embeddings_of(model)
    assert embedding.method == method == options.embedding["method"]
    untrained = (table(teacher)[2:]).norm(dim=1).mean()
    assert (embedding.table() - table(teacher))[2:].norm(dim=1).mean() < untrained
    assert not [name for name in checkpoint["model"] if "teacher" in name]


def test_standard_student_equals_its_teacher(teacher: Path, host: Host) -> None:
    student = distilled(host, teacher, STANDARD, **STILL)
    assert torch.equal(table(student)[2:], table(teacher)[2:])
    assert host.translate(student) == host.translate(teacher)


@pytest.mark.slow
def test_each_side_is_fitted_to_its_own_table(trained: Trained, host: Host) -> None:
    options = {"share_embeddings": False, "share_decoder_embeddings": False}
    _, teacher = trained(embedding=STANDARD, **options)
    student = distilled(host, teacher, GROUPS, **options, **STILL)
    model, *_ = build_from_checkpoint(str(student))
    full, *_ = build_from_checkpoint(str(teacher))
    for side, other in (("source", "target"), ("target", "source")):
        fitted = words_module(model, side).table()  # type: ignore[union-attr]
        missed = {name: (fitted - words_module(full, name).table()).norm() for name in (side, other)}  # type: ignore[union-attr]
        assert missed[side] < 0.7 * missed[other]
    assert torch.equal(weights(student)["generator.weight"], weights(teacher)["generator.weight"])
    assert torch.equal(weights(student)["generator.bias"], weights(teacher)["generator.bias"])


def test_fit_steps_are_passed_on(trained: Trained, host: Host, fit_steps: list[int | None]) -> None:
    distilled(host, trained(embedding=STANDARD)[1], PROJECTIVE, d_fit_steps=7, **STILL)
    assert fit_steps == [7]


@pytest.mark.slow
def test_random_starts(teacher: Path, host: Host) -> None:
    scratch = host.train("scratch", embedding=PROJECTIVE, **STILL)
    own_table = distilled(host, teacher, PROJECTIVE, d_embedding_start="random", **STILL)
    assert torch.equal(table(own_table), table(scratch))
    assert all(torch.equal(tensor, network(teacher)[name]) for name, tensor in network(own_table).items())
    own_network = distilled(host, teacher, PROJECTIVE, d_network_start="random", **STILL)
    torch.testing.assert_close(table(own_network), svd(table(teacher), 4), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(tensor, network(scratch)[name]) for name, tensor in network(own_network).items())


@pytest.mark.slow_except("network")
@pytest.mark.parametrize("what", ["embedding", "network"])
def test_frozen_parameters_stay_frozen_after_resume(what: str, teacher: Path, host: Host) -> None:
    start = distilled(host, teacher, PROJECTIVE, **STILL).rename(host.folder / "start.pt")
    first = distilled(host, teacher, PROJECTIVE, d_freeze=what, train_steps=3)
    run("onmt_train -train_steps 6 -config", host.folder / "student.yaml", "-train_from", first)
    final = host.folder / "student_step_6.pt"
    for name, tensor in weights(start).items():
        if ("emb_luts.0" in name) == (what == "embedding"):
            assert torch.equal(tensor, weights(final)[name]), name
    assert torch.equal(table(start), table(final)) == (what == "embedding")


def test_start_and_progress_report_the_loss(teacher: Path, host: Host) -> None:
    log = host.folder / "log"
    distilled(host, teacher, PROJECTIVE, log_file=str(log), learning_rate=0.0)
    text = log.read_text()
    fitted = re.search(
        r"Fitted the target embedding.*reconstruction loss ([\d.]+), relative error ([\d.]+)", text
    )
    assert fitted is not None
    full = table(teacher)
    full[1] = 0.0
    missed = (svd(full, 4) - full)[[0, *range(2, 88)]]
    assert float(fitted.group(1)) == pytest.approx(float(missed.norm(dim=1).mean()), abs=1e-4)
    assert float(fitted.group(2)) == pytest.approx(float(missed.norm() / full.norm()), abs=1e-3)
    reported = re.findall(r"INFO\] reconstruction loss: ([\d.]+)", text)
    assert [float(loss) for loss in reported] == pytest.approx([float(fitted.group(1))] * 3, abs=1e-4)


@pytest.mark.slow_except("projective")
@pytest.mark.parametrize("embedding", [PROJECTIVE, GROUPS], ids=["projective", "group_reduce"])
def test_resume_is_exact(embedding: dict[str, Any], teacher: Path, host: Host) -> None:
    keys = {"alpha": 0.5, "soft_targets": 0.5}
    whole = weights(distilled(host, teacher, embedding, **{f"d_{key}": value for key, value in keys.items()}))
    first = host.folder / "student_step_3.pt"
    moved = host.folder / "moved.pt"
    moved.write_bytes(teacher.read_bytes())
    distillation = {"teacher": str(moved), **keys}
    config = host.config("student", embedding=embedding, embedding_distillation=distillation)
    run("onmt_train -config", config, "-train_from", first)
    resumed = host.folder / "student_step_6.pt"
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, whole[name]), name
    assert read_checkpoint(resumed)["opt"].embedding_distillation == distillation


def test_resume_without_the_option_keeps_its_value(
    teacher: Path, host: Host, error_line: Callable[..., str]
) -> None:
    teacher_copy = host.folder / "teacher.pt"
    teacher_copy.write_bytes(teacher.read_bytes())
    first = distilled(host, teacher_copy, PROJECTIVE, train_steps=2)
    log = host.folder / "log"
    resume = (
        "onmt_train -train_steps 4 -config",
        host.config("student", log_file=str(log)),
        "-train_from",
        first,
    )
    run(*resume)
    assert "reconstruction loss: " in log.read_text()
    teacher_copy.unlink()
    printed = error_line(*resume)
    assert "embedding_distillation: teacher" in printed and "no such file" in printed
    printed = error_line(*resume, "-embedding_distillation", f"{{teacher: {teacher}, alpha: 0.5}}")
    assert "has no effect with train_from" in printed and "'alpha': 0.01" in printed


def test_language_model(host: Host) -> None:
    """Upstream's decoder-only model has one table, which is also its output."""
    options = host.language_model()
    teacher = host.train("teacher", embedding=STANDARD, **options)
    student = distilled(host, teacher, PROJECTIVE, **options, **STILL)
    torch.testing.assert_close(table(student), svd(table(teacher), 4), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(tensor, network(teacher)[name]) for name, tensor in network(student).items())


def test_words_are_counted(host: Host) -> None:
    path = host.write("counted", ["a\t7", "b\t2"])
    words = ["<unk>", "<blank>", "<s>", "</s>", "a", "b", "averyunlikelytoken0"]
    counted, bare = (
        Namespace(src_vocab=name, share_vocab=True) for name in (path, host.write("bare", ["a", "b"]))
    )
    assert token_counts(words, counted, "source").tolist() == [1, 1, 7, 7, 7, 2, 1]  # type: ignore[union-attr]
    assert token_counts(words, bare, "source") is None
    assert vocabulary_counts(str(path)) == {"a": 7, "b": 2}


@pytest.mark.parametrize(
    ("option", "printed"),
    [
        ("[1]", "is not a mapping; write it like"),
        ("{teacher: x, alfa: 0.1}", "unknown option 'alfa'. Did you mean 'alpha'?"),
        ("{teacher: x, alpha: 0.1, freeze: embedding}", "alpha: 0.1 has no effect with freeze: embedding"),
        ("{teacher: x, alpha: 0, embedding_start: random, network_start: random}", "has no effect"),
    ],
)
def test_wrong_options_fail(option: str, printed: str) -> None:
    with pytest.raises(UserError, match=printed):
        parse_distillation(parse_mapping("embedding_distillation", option, "{teacher: x}"))


def test_defaults_and_numbers_with_an_exponent() -> None:
    """PyYAML parses 1e-3 as text, also in a configuration file."""
    default, frozen, small = (
        parse_distillation(parse_mapping("embedding_distillation", {"teacher": "x", **more}, ""))
        for more in ({}, {"freeze": "embedding"}, {"alpha": "1e-3"})
    )
    assert (default.alpha, default.freeze, frozen.alpha, small.alpha) == (0.01, "none", 0.0, 0.001)


@pytest.mark.slow
def test_unsuitable_teachers_are_rejected(
    trained: Trained, host: Host, error_line: Callable[..., str]
) -> None:
    _, teacher = trained(embedding=STANDARD)
    apart = trained(embedding=STANDARD, share_embeddings=False)[1]
    narrow = {"word_vec_size": 8, "hidden_size": 8, "share_decoder_embeddings": False}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (teacher, {"embedding": None}, "has no effect without `embedding`"),
        (teacher, {"soft_targets": 0.5, "truncated_decoder": 2}, "does not work with truncated_decoder: 2"),
        (teacher, {"embedding": {**METHODS["alone"], "seed": 3}}, "cannot have its own `seed`"),
        (host.folder / "none.pt", {}, "no such file"),
        (teacher, {"transformer_ff": 64}, "feed_forward.w_1.weight is (64, 16) in this model, (32, 16)"),
        (teacher, narrow, "(88, 16), that of this model (88, 8)"),
        (apart, {}, "was trained with share_embeddings: false"),
    ]
    for path, options, printed in cases:
        option = {"teacher": str(path), "soft_targets": options.pop("soft_targets", 0.0)}
        settings = {"embedding": PROJECTIVE, "embedding_distillation": option, **options}
        assert printed in error_line("onmt_train -config", host.config("student", **settings))


@pytest.mark.slow
def test_another_vocabulary_of_the_same_size_fails(
    teacher: Path, host: Host, error_line: Callable[..., str]
) -> None:
    words = (host.folder / "vocab").read_text().splitlines()
    vocabulary = host.write("reversed", words[::-1])
    option = {"teacher": str(teacher)}
    config = host.config(
        "new", embedding=PROJECTIVE, embedding_distillation=option, src_vocab=str(vocabulary)
    )
    assert f"vocabulary of the teacher {teacher}" in error_line("onmt_train -config", config)


def test_a_released_student_needs_no_teacher(teacher: Path, host: Host) -> None:
    teacher_copy = host.folder / "teacher.pt"
    teacher_copy.write_bytes(teacher.read_bytes())
    student = distilled(host, teacher_copy, PROJECTIVE, train_steps=1)
    teacher_copy.unlink()
    released, averaged = host.folder / "released.pt", host.folder / "averaged.pt"
    run("onmt_release_model -model", student, "-output", released)
    run("onmt_average_models -models", student, student, "-output", averaged)
    for model in (released, averaged):
        assert read_checkpoint(str(model))["opt"].embedding_distillation is None
        host.train(f"next_{model.stem}", "-train_from", model, train_steps=1)
