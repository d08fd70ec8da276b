"""Options out of range."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import onmt.bin.build_vocab
import onmt.bin.train
import onmt.bin.translate
import pytest
import torch

from nmt.hooks import apply_patches
from nmt.options import RANGES, check_memory, check_model_sizes, check_ranges, known_names, parse
from nmt.vocabulary import Vocab
from shared_embeddings.utils.errors import UserError
from tests.nmt.conftest import MODEL, Host

pytestmark = pytest.mark.usefixtures("installed_host")


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
