"""Valid values of the options of ``onmt_train``, ``onmt_translate`` and ``onmt_build_vocab``.

OpenNMT-py accepts NaN, infinity and negative numbers for most options. `RANGES` has every numeric option, and
`names` every option with a fixed set of names.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shared_embeddings.errors import UserError

# Largest number of steps, lines and words (32 bits).
COUNTED = 2**31 - 1
# Larger than any published model; `nmt.options.checks` checks what fits this machine.
WIDEST, DEEPEST, MOST_HEADS = 2**16, 1000, 1024
PROCESSES = 1024


@dataclass(frozen=True)
class Range:
    """A range of numbers; NaN and infinity are outside of every range.

    Attributes:
        least: the smallest number.
        most: the largest number.
        above: exclude `least`.
        below: exclude `most`.
        unset: further values, which disable the option.
    """

    least: float = 0
    most: float = COUNTED
    above: bool = False
    below: bool = False
    unset: tuple[int, ...] = ()

    def contains(self, number: float) -> bool:
        """Return whether `number` is in the range."""
        from_least = number > self.least if self.above else number >= self.least
        to_most = number < self.most if self.below else number <= self.most
        return (from_least and to_most) or number in self.unset

    def describe_error(self, number: float) -> str:
        """Describe why a number is outside of the range."""
        least = f"{'above' if self.above else 'at least'} {self.least:,}"
        most = f"{'below' if self.below else 'at most'} {self.most:,}"
        others = "".join(f", or {value}" for value in self.unset)
        if isinstance(number, float) and not math.isfinite(number):
            return f"{number} is not a finite number; expected {least} and {most}{others}"
        if number > self.least:
            return f"{number} is too large; expected {most}"
        return f"{number} is too small; expected {least}{others}"


ANY_COUNT = Range()
AT_LEAST_ONE = Range(1)
UNSET_OR_COUNT = Range(0, unset=(-1,))
POSITIVE = Range(0, math.inf, above=True, below=True)
WEIGHT = Range(0, math.inf, below=True)
PROBABILITY = Range(0, 1, below=True)
SHARE = Range(0, 1)
WIDTH = Range(1, WIDEST)
UNSET_OR_WIDTH = Range(1, WIDEST, unset=(-1, 0))

MODEL: dict[str, Range] = {
    **dict.fromkeys(("src_word_vec_size", "tgt_word_vec_size", "enc_hid_size", "dec_hid_size"), WIDTH),
    **dict.fromkeys(("word_vec_size", "hidden_size", "feat_vec_size"), UNSET_OR_WIDTH),
    **dict.fromkeys(("enc_layers", "dec_layers"), Range(1, DEEPEST)),
    "layers": Range(1, DEEPEST, unset=(-1,)),
    "feat_vec_exponent": Range(0, 1, unset=(-1,)),
    "transformer_ff": Range(1, 16 * WIDEST),
    "heads": Range(1, MOST_HEADS),
    "num_kv": Range(0, MOST_HEADS),
    "alignment_heads": Range(0, MOST_HEADS),
    "alignment_layer": Range(-DEEPEST, DEEPEST),
    "num_experts": Range(0, MOST_HEADS),
    "num_experts_per_tok": Range(1, MOST_HEADS),
    # -1: rotary positions, -2: ALiBi.
    "max_relative_positions": Range(0, WIDEST, unset=(-1, -2)),
    "relative_positions_buckets": Range(0, WIDEST),
    "rotary_theta": AT_LEAST_ONE,
    "rotary_dim": Range(0, WIDEST),
    "sliding_window": ANY_COUNT,
    "norm_eps": Range(0, 1, above=True),
    "cnn_kernel_width": Range(1, 999),
    "input_feed": Range(0, 1),
    **dict.fromkeys(("state_dim", "n_edge_types", "n_node", "n_steps"), WIDTH),
    "src_ggnn_size": Range(0, WIDEST),
    "lora_rank": WIDTH,
    "lora_alpha": AT_LEAST_ONE,
    "lora_dropout": PROBABILITY,
    "dropout": PROBABILITY,
    "attention_dropout": PROBABILITY,
}
LOSS: dict[str, Range] = {
    "label_smoothing": PROBABILITY,
    **dict.fromkeys(("lambda_align", "lambda_coverage", "lm_prior_lambda"), WEIGHT),
    "lm_prior_tau": POSITIVE,
    "loss_scale": WEIGHT,
}
OPTIMIZATION: dict[str, Range] = {
    "learning_rate": WEIGHT,
    "learning_rate_decay": Range(0, 1, above=True),
    "start_decay_steps": ANY_COUNT,
    "decay_steps": AT_LEAST_ONE,
    "warmup_steps": ANY_COUNT,
    "max_grad_norm": WEIGHT,
    "adam_beta1": PROBABILITY,
    "adam_beta2": PROBABILITY,
    "adagrad_accumulator_init": WEIGHT,
    "param_init": WEIGHT,
    "average_decay": SHARE,
    "average_every": AT_LEAST_ONE,
    "accum_count": AT_LEAST_ONE,
    "accum_steps": ANY_COUNT,
    "dropout_steps": ANY_COUNT,
    "truncated_decoder": ANY_COUNT,
}
RUN: dict[str, Range] = {
    "train_steps": ANY_COUNT,
    "valid_steps": AT_LEAST_ONE,
    "save_checkpoint_steps": ANY_COUNT,
    "keep_checkpoint": UNSET_OR_COUNT,
    "report_every": AT_LEAST_ONE,
    "early_stopping": ANY_COUNT,
    # NumPy's seeds have 32 bits; -1 and 0 draw a random seed.
    "seed": Range(0, 2**32 - 1, unset=(-1,)),
    "num_workers": Range(0, PROCESSES),
    "num_threads": Range(1, PROCESSES),
    "prefetch_factor": AT_LEAST_ONE,
    "world_size": AT_LEAST_ONE,
    "gpu_ranks": ANY_COUNT,
    "gpu": UNSET_OR_COUNT,
    "gpu_verbose_level": ANY_COUNT,
    "master_port": Range(1, 2**16 - 1),
    "timeout": AT_LEAST_ONE,
}
DATA: dict[str, Range] = {
    **dict.fromkeys(("batch_size", "valid_batch_size", "batch_size_multiple", "bucket_size"), AT_LEAST_ONE),
    "bucket_size_init": UNSET_OR_COUNT,
    "bucket_size_increment": ANY_COUNT,
    "n_sample": UNSET_OR_COUNT,
    "n_src_feats": Range(0, 100),
    **dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), AT_LEAST_ONE),
    # The vocabulary is padded to a multiple of it with distinct words.
    "vocab_size_multiple": Range(1, WIDEST),
    **dict.fromkeys(("src_words_min_frequency", "tgt_words_min_frequency"), ANY_COUNT),
    **dict.fromkeys(("src_seq_length_trunc", "tgt_seq_length_trunc"), AT_LEAST_ONE),
    **dict.fromkeys(("src_seq_length", "tgt_seq_length"), AT_LEAST_ONE),
    "learn_subwords_size": AT_LEAST_ONE,
    "vocab_sample_queue_size": AT_LEAST_ONE,
}
TRANSFORMS: dict[str, Range] = {
    **dict.fromkeys(("switchout_temperature", "tokendrop_temperature", "tokenmask_temperature"), WEIGHT),
    **dict.fromkeys(("term_corpus_ratio", "term_example_ratio", "fuzzy_corpus_ratio"), SHARE),
    **dict.fromkeys(("tags_corpus_ratio", "upper_corpus_ratio"), SHARE),
    **dict.fromkeys(("permute_sent_ratio", "rotate_ratio", "insert_ratio"), SHARE),
    **dict.fromkeys(("random_ratio", "mask_ratio"), SHARE),
    # Larger values overflow.
    "poisson_lambda": Range(0, 100, above=True),
    **dict.fromkeys(("src_subword_nbest", "tgt_subword_nbest"), UNSET_OR_COUNT),
    **dict.fromkeys(("src_subword_alpha", "tgt_subword_alpha"), SHARE),
    **dict.fromkeys(("src_vocab_threshold", "tgt_vocab_threshold"), ANY_COUNT),
    "fuzzy_threshold": Range(0, 100),
    **dict.fromkeys(("fuzzymatch_min_length", "fuzzymatch_max_length"), ANY_COUNT),
    # Each tag is two words of the vocabulary.
    "max_tags": Range(1, WIDEST),
    "src_tgt_ratio": AT_LEAST_ONE,
    **dict.fromkeys(("avg_tok_min", "avg_tok_max"), WEIGHT),
    **dict.fromkeys(("doc_length", "max_context"), ANY_COUNT),
}
SEARCH: dict[str, Range] = {
    # Each beam needs a row of scores of the whole vocabulary.
    "beam_size": Range(1, 1000),
    "n_best": Range(1, 1000),
    "ratio": WEIGHT,
    "random_sampling_topk": UNSET_OR_COUNT,
    "random_sampling_topp": SHARE,
    "random_sampling_temp": WEIGHT,
    # An exponent of lengths; larger values overflow.
    "alpha": Range(-10, 10),
    "beta": WEIGHT,
    "min_length": ANY_COUNT,
    "max_length": Range(1, 1_000_000),
    "max_length_ratio": WEIGHT,
    "block_ngram_repeat": ANY_COUNT,
}
RANGES: dict[str, Range] = {
    **MODEL,
    **LOSS,
    **OPTIMIZATION,
    **RUN,
    **DATA,
    **TRANSFORMS,
    **SEARCH,
}


def names() -> dict[str, tuple[str, ...]]:
    """Return the valid names of options that OpenNMT-py does not check."""
    from onmt.decoders import str2dec
    from onmt.encoders import str2enc
    from onmt.scorers import AVAILABLE_SCORERS
    from onmt.utils.earlystopping import SCORER_BUILDER

    return {
        "encoder_type": tuple(sorted(str2enc)),
        "decoder_type": tuple(sorted(str2dec)),
        "self_attn_type": ("average", "scaled-dot", "scaled-dot-flash"),
        "valid_metrics": tuple(sorted(AVAILABLE_SCORERS)),
        "early_stopping_criteria": tuple(sorted(SCORER_BUILDER)),
        "gpu_backend": ("gloo", "nccl"),
        "data_type": ("text",),
        # OpenNMT-py 3.5 reads int8 as fp32.
        "precision": ("", "fp32", "fp16"),
    }


def check_ranges(opt: Namespace) -> None:
    """Check all numbers and names among the options; raises `UserError` otherwise."""
    for name, allowed in RANGES.items():
        for number in _values(opt, name):
            if not allowed.contains(number):
                raise UserError(f"{name}: {allowed.describe_error(number)}")
    known: Mapping[str, Iterable[str]] = names()
    for name, choices in known.items():
        if name == "encoder_type" and getattr(opt, "model_task", "seq2seq") == "lm":
            continue  # a language model has no encoder
        for value in _values(opt, name):
            if value not in choices:
                raise UserError(f"{name}: {value!r} is unknown; use {' or '.join(filter(None, choices))}")


def _values(opt: Namespace, name: str) -> list[Any]:
    """Return the values of an option, which may be a list or not set."""
    value = getattr(opt, name, None)
    return value if isinstance(value, list) else [] if value is None else [value]
