"""Damaged checkpoints of onmt_train, and options out of range."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onmt.bin.build_vocab
import onmt.bin.train
import onmt.bin.translate
import pytest
import torch

from nmt import cli
from nmt.checkpoints import allow_checkpoint_types
from nmt.hooks import apply_patches
from nmt.options import RANGES, check_memory, check_model_sizes, check_ranges, known_names, parse
from nmt.vocabulary import Vocab
from shared_embeddings.cli.main import main as shared_embeddings
from shared_embeddings.utils.errors import UserError
from tests.helpers import Odd, alter, names_file
from tests.nmt.conftest import MODEL, Capture, Host, Trained

pytestmark = pytest.mark.usefixtures("installed_host")

STANDARD = {"method": "standard"}
OPTIONS = "embedding hidden_size dec_layers heads encoder_type share_embeddings model_task dropout".split()


def odd_parts(good: Path, path: Path) -> Iterator[tuple[str, Path]]:
    """Checkpoints with a part of another type, by its name."""
    content = torch.load(good, weights_only=True)
    for part in ("model", "vocab", "opt", "generator", "optim", "resume"):
        for kind, value in Odd.VALUES.items():
            yield f"{part}: {kind}", alter(good, lambda c: c.update({part: value}), path)  # noqa: B023
    for kind, state in Odd.tensors(content["model"]).items():
        yield f"tensor: {kind}", alter(good, lambda c: c.update(model=state), path)  # noqa: B023
    for side in ("src", "tgt", "data_task", "decoder_start_token", "src_feats"):
        for kind, value in Odd.VALUES.items():
            yield f"words {side}: {kind}", alter(good, lambda c: c["vocab"].update({side: value}), path)  # noqa: B023
    for kind, value in {**Odd.VALUES, "a list of one": [content]}.items():
        torch.save(value, path)
        yield f"whole: {kind}", path


def odd_options(good: Path, path: Path) -> Iterator[tuple[str, Path]]:
    """Checkpoints with an option of another type, by its name."""
    for name in OPTIONS:
        for kind, value in Odd.VALUES.items():
            yield f"option {name}: {kind}", alter(good, lambda c: setattr(c["opt"], name, value), path)  # noqa: B023
    yield "no options", alter(good, lambda c: c.update(opt=Namespace()), path)


def odd_runs(good: Path, path: Path) -> Iterator[tuple[str, Path]]:
    """Checkpoints with an invalid training state."""
    content = torch.load(good, weights_only=True)
    for name in content["optim"]:
        for kind, value in Odd.VALUES.items():
            yield f"optim {name}: {kind}", alter(good, lambda c: c["optim"].update({name: value}), path)  # noqa: B023
    for name in content["resume"][0]:
        for kind, value in Odd.VALUES.items():
            yield f"resume {name}: {kind}", alter(good, lambda c: c["resume"][0].update({name: value}), path)  # noqa: B023
    wider = {"step": torch.tensor(6.0), **{name: torch.zeros(3, 3) for name in ("exp_avg", "exp_avg_sq")}}
    state = {**content["optim"]["optimizer"], "state": {0: wider}}
    yield "optim: another shape", alter(good, lambda c: c["optim"].update(optimizer=state), path)


def outcome(command: str, arguments: list[object], capsys: Capture) -> tuple[object, str]:
    """The exit status of a command, or its uncaught error, and its stderr."""
    capsys.readouterr()
    status: object = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [command, *map(str, arguments)])
        try:
            if command == "shared-embeddings":
                status = shared_embeddings([str(one) for one in arguments])
            else:
                getattr(cli, command.removeprefix("onmt_"))()
        except SystemExit as end:
            status = end.code
        except Exception as error:
            status = repr(error)
    return status, capsys.readouterr().err


def training(host: Host, model: Path, folder: Path) -> list[object]:
    """Arguments that resume training for a step."""
    config = host.config("odd", embedding=None, train_steps=7, save_model=str(folder / "save"))
    return ["-config", config, "-train_from", model]


USES: dict[str, tuple[str, Callable[[Host, Path, Path], list[object]]]] = {
    "translate": (
        "onmt_translate",
        lambda host, model, folder: [
            *("-model", model, "-src", host.folder / "test.src", "-output", folder / "out"),
            *("-max_length", 3, "-beam_size", 1),
        ],
    ),
    "train": ("onmt_train", training),
    "release": ("onmt_release_model", lambda _, model, folder: ["-model", model, "-output", folder / "out"]),
    "average": (
        "onmt_average_models",
        lambda _, model, folder: ["-models", model, "-output", folder / "out"],
    ),
    "compress": (
        "shared-embeddings",
        lambda _, model, folder: [
            *("compress", "--model", model, "--method", "funnel", "--rank", 2, "--output", folder / "out"),
            *("--fit-steps", 2),
        ],
    ),
    "trim": (
        "shared-embeddings",
        lambda host, model, folder: [
            *("trim", "--model", model, "--text", host.folder / "test.src", "--output", folder / "out")
        ],
    ),
    "similarity": (
        "shared-embeddings",
        lambda host, model, _: ["similarity", "--model", model, "--pairs", host.write("pairs", ["w1 w2 3"])],
    ),
}


@pytest.mark.parametrize("claimed", [{"enc_layers": 10**8}, {"transformer_ff": 10**8}], ids=str)
def test_claims_of_size_fail_before_memory_is_filled(
    trained: Trained, tmp_path: Path, capsys: Capture, claimed: dict[str, int]
) -> None:
    allow_checkpoint_types()
    host, good = trained(embedding=STANDARD)
    model = alter(good, lambda content: vars(content["opt"]).update(claimed), tmp_path / "model.pt")
    for use in ("translate", "train", "compress"):
        command, arguments = USES[use]
        status, error = outcome(command, arguments(host, model, tmp_path), capsys)
        assert status == 2 and names_file(error, command, model) and "claim more" in error, error


# Optional or irrelevant parts: no model is built from a released or averaged checkpoint.
MAY_BE = (
    *("generator: None", "generator: an empty mapping", "optim: None", "resume: None"),
    *("words data_task: a string", "words decoder_start_token: a string"),
    *(f"option share_embeddings: {kind}" for kind in Odd.VALUES),
    *("option dropout: a list", "resume early_stopping: None"),
    *("optim training_step: a number", "optim decay_step: a number"),
)
WHOLE = {("release", odd_parts), ("similarity", odd_options), ("train", odd_runs)}
UNBUILT = ("tensor: longer", "tensor: one axis", "tensor: empty", "tensor: left", "model: an empty mapping")


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_checkpoint_parts_of_another_type(
    trained: Trained, tmp_path: Path, capsys: Capture, use: str
) -> None:
    allow_checkpoint_types()
    host, good = trained(embedding=STANDARD)
    command, arguments = USES[use]
    failures = []
    tables = [odd_parts] + [odd_options] * (use not in ("release", "average")) + [odd_runs] * (use == "train")
    for table in tables:
        # All use one function: the fastest command gets every case, each other command a fifth.
        is_intact = (use, table) in WHOLE
        for number, (kind, model) in enumerate(table(good, tmp_path / "odd.pt")):
            if kind in MAY_BE or (use in ("release", "average") and kind.startswith(UNBUILT)):
                continue
            if not is_intact and number % 5 != list(USES).index(use) % 5:
                continue
            status, error = outcome(command, arguments(host, model, tmp_path), capsys)
            for written in (tmp_path / "out", *tmp_path.glob("save*")):
                written.unlink(missing_ok=True)
            if status != 2 or not names_file(error, command, model):
                failures.append(f"{kind}: {status} {error[-300:]}")
    assert not failures, "\n".join(failures)


def test_every_number_has_a_range_with_its_default() -> None:
    apply_patches()
    modules = (onmt.bin.train, onmt.bin.translate, onmt.bin.build_vocab)
    actions = [action for module in modules for action in module._get_parser()._actions]
    numeric = {action.dest for action in actions if action.type in (int, float) and not action.choices}
    assert numeric == RANGES.keys()
    assert set(known_names()) <= {action.dest for action in actions}
    for action in actions:
        check_ranges(Namespace(**{action.dest: action.default}))


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("label_smoothing", [0, 0.1, 0.999], [-0.1, 1, 5]),
        ("word_vec_size", [-1, 1, 65536], [-2, 65537]),
        ("layers", [-1, 1, 1000], [0, -2, 1001]),
        ("learning_rate_decay", [1e-9, 1], [0, 1.1]),
        ("max_relative_positions", [-2, -1, 0, 64], [-3]),
        ("seed", [-1, 0, 2**32 - 1], [-2, 2**32]),
        ("encoder_type", ["transformer", "cnn"], ["transformr", "lm"]),
        ("gpu_backend", ["gloo", "nccl"], ["mpi", ""]),
        ("precision", ["", "fp32"], ["int8"]),
    ],
)
def test_bounds(name: str, right: list[Any], wrong: list[Any]) -> None:
    for value in right:
        check_ranges(Namespace(**{name: value}))
    for value in wrong:
        with pytest.raises(UserError, match=f"^{name}: "):
            check_ranges(Namespace(**{name: value}))


def sized(**changed: Any) -> Namespace:
    """The options of a small Transformer with changes, completed by upstream."""
    apply_patches()
    opt = onmt.bin.train._get_parser().parse_known_args(["-data", "d", "-src_vocab", "v"])[0]
    vars(opt).update({**MODEL, "share_embeddings": False, "share_decoder_embeddings": False, **changed})
    onmt.bin.train.ArgumentParser.update_model_opts(opt)
    return opt


@pytest.mark.parametrize(
    ("changed", "printed"),
    [
        ({"word_vec_size": 12}, "src_word_vec_size: 12 differs from hidden_size 16, which a transformer"),
        ({"encoder_type": "mean", "decoder_type": "rnn", "word_vec_size": 12}, "a mean does not support"),
        ({"encoder_type": "rnn", "word_vec_size": 12}, "tgt_word_vec_size: 12 differs from"),
        ({"heads": 3}, "heads: 3 does not divide hidden_size 16"),
        ({"heads": 4, "num_kv": 3}, "num_kv: 3 does not divide heads 4"),
        ({"alignment_heads": 3}, "alignment_heads: 3 is more than heads 2"),
        ({"num_experts": 1}, "num_experts_per_tok: 2 is more than num_experts 1"),
        ({"max_relative_positions": -1, "rotary_dim": 3}, "rotary_dim: 3 must be even"),
        ({"max_relative_positions": -1, "rotary_dim": 10}, "at most the 8 dimensions of a head"),
        ({"relative_positions_buckets": 4}, "needs max_relative_positions"),
        ({"encoder_type": "brnn", "decoder_type": "rnn", "hidden_size": 15}, "hidden_size: 15 is odd"),
        ({"encoder_type": "cnn", "decoder_type": "cnn", "cnn_kernel_width": 4}, "cnn_kernel_width: 4"),
        (
            {"word_vec_size": -1, "share_embeddings": True, "encoder_type": "rnn", "src_word_vec_size": 12},
            "share_embeddings: true needs one width",
        ),
        ({"hidden_size": -1, "decay_method": "noam", "enc_hid_size": 16, "dec_hid_size": 16}, "hidden_size"),
    ],
)
def test_inconsistent_sizes(changed: dict[str, Any], printed: str) -> None:
    check_model_sizes(sized())
    if "word_vec_size" in changed and changed["word_vec_size"] < 0:
        changed = {"tgt_word_vec_size": 16, **changed}
    with pytest.raises(UserError) as error:
        check_model_sizes(sized(**changed))
    assert printed in str(error.value)


@pytest.mark.parametrize("changed", [{"hidden_size": 65536, "word_vec_size": 65536, "layers": 9}])
def test_a_model_that_exceeds_memory(changed: dict[str, Any], host: Host) -> None:
    opt, vocabulary = sized(**changed, heads=1), Vocab(["<blank>", *map(str, range(99))])
    words = {"src": vocabulary, "tgt": vocabulary}
    with pytest.raises(UserError, match=r"the model has .* GiB; reduce hidden_size"):
        check_memory(opt, words)
    check_memory(sized(), words)
    assert torch.get_default_device().type == "cpu"


def test_boolean_words_are_parsed(host: Host) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for text, wanted in (("false", False), ("True", True), ("no", False)):
            patch.setattr("sys.argv", ["onmt_train", "-data", "d", "-src_vocab", "v", "-penn", text])
            assert parse(onmt.bin.train._get_parser(), "-config train.yaml").penn is wanted
