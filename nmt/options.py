"""Options of OpenNMT-py's commands: parsing, files, ranges, and checks that OpenNMT-py lacks.

Every check raises `UserError`, which says what is wrong and what to do.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import configargparse
import torch

from nmt.checkpoints import safetensors_of
from nmt.plan import parse_text
from shared_embeddings.utils.command_line import check_repeats, finite_number, last_line, whole_number
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import followed, staged
from shared_embeddings.utils.options import check_known
from shared_embeddings.utils.path_options import Given, PathOption, check_input, check_paths
from shared_embeddings.utils.reading import parse_yaml

# The options of a command that name files, and how it uses them.
Table = Mapping[str, PathOption]
SUBWORD_FILES = ("src_subword_model", "tgt_subword_model", "src_subword_vocab", "tgt_subword_vocab")
READ: Table = dict.fromkeys(
    (*SUBWORD_FILES, "termbase_path", "tm_path", "tags_dictionary_path"), PathOption.FILE
)
TRANSLATE: Table = {
    **READ,
    **dict.fromkeys(("models", "src", "tgt", "desired_lengths", "phrase_table"), PathOption.FILE),
    **dict.fromkeys(("output", "log_file"), PathOption.OUTPUT),
}
TRAIN: Table = {
    **READ,
    **dict.fromkeys(("train_from", "src_embeddings", "tgt_embeddings", "both_embeddings"), PathOption.FILE),
    **dict.fromkeys(("pre_word_vecs_enc", "pre_word_vecs_dec"), PathOption.FILE),
    "log_file": PathOption.OUTPUT,
}
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


# Parsing


def parse(
    parser: Any, example: str, table: Table | None = None, known_elsewhere: Collection[str] = ()
) -> Namespace:
    """Parse the command line and the configuration file; unknown and repeated options fail by name.

    The command line takes precedence. An output that is a symbolic link becomes the target of the link.
    The help ends with the arguments of an `example`. `known_elsewhere` are options of other commands, which a
    shared configuration file may contain.
    """
    table = table or {}
    parser.error, parser.epilog = fail, last_line(parser.prog, example)
    if isinstance(parser, configargparse.ArgumentParser):
        parser._config_file_parser = ConfigurationReader()
        parser._config_file_open_func = _open_config
        parser.write_config_file = partial(_save_config, parser, parser.write_config_file, table)
        check_repeats(parser)
    for action in parser._actions:
        action.type = STRICTER.get(action.type, action.type)
    try:
        opt, rest = parser.parse_known_args()
    except argparse.ArgumentTypeError as error:
        raise UserError(str(error)) from error
    known = {string.lstrip("-") for action in parser._actions for string in action.option_strings}
    names = [word for word in rest if word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)]
    for name in (word.lstrip("-").split("=")[0] for word in names):
        if name not in known_elsewhere:
            check_known("option", name, known)
    if rest and not names:
        raise UserError(f"unexpected argument {rest[0]!r}; see --help")
    check_files(opt, table)
    for name, kind in table.items():
        if kind is PathOption.OUTPUT and getattr(opt, name, None):
            setattr(opt, name, str(followed(Path(getattr(opt, name)))))
    return opt  # type: ignore[no-any-return]


def given_options(parser: Any) -> frozenset[str]:
    """Return the names of the options on the command line and in the configuration file, after `parse`.

    The parser must be a new one; its defaults are removed.
    """
    parser._config_file_parser, parser._config_file_open_func = ConfigurationReader(), _open_config
    for action in parser._actions:
        action.default, action.required = argparse.SUPPRESS, False
    return frozenset(vars(parser.parse_known_args()[0]))


def fail(message: str) -> None:
    """Raise `UserError`; the method `error` of parsers."""
    raise UserError(message)


def _boolean(text: str) -> bool:
    """Parse a boolean; `bool` would accept any text as true."""
    if text.lower() not in BOOLEANS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return BOOLEANS[text.lower()]


# Stricter types of OpenNMT-py's options.
STRICTER = {bool: _boolean, int: whole_number, float: finite_number}


class ConfigurationReader(configargparse.YAMLConfigFileParser):  # type: ignore[misc]
    """Reads YAML configuration files with limits on their size; repeated keys fail."""

    def parse(self, stream: IO[str]) -> dict[str, Any]:
        """Return the options of a file: lists unchanged, mappings as JSON, other values as text."""
        name = f"config {stream.name}"
        try:
            content = parse_yaml(stream.read().removeprefix("\ufeff"), name)
        except UnicodeDecodeError:
            raise UserError(f"{name}: is not UTF-8 text; convert it") from None
        if not isinstance(content, dict):
            raise UserError(f"{name}: is not a mapping; write one 'option: value' per line")
        names = [key.lstrip("-") for key in content]
        for key in names:
            if not re.fullmatch(r"\w[\w-]*", key):
                raise UserError(f"{name}: {key!r} is not an option; see --help")
            if names.count(key) > 1:
                raise UserError(f"{name}: the option {key} is given twice; give it once")
        return {
            key: value
            if isinstance(value, list)
            else json.dumps(value, ensure_ascii=False)
            if isinstance(value, dict)
            else str(value)
            for key, value in content.items()
            if value is not None
        }


def _open_config(path: str, mode: str = "r") -> IO[str]:
    if mode == "r":
        check_input("config", path)
    return open(path, mode, encoding="utf-8")


def _save_config(
    parser: Any,
    original: Callable[..., None],
    table: Table,
    opt: Namespace,
    paths: Iterable[str],
    exit_after: bool = False,
) -> None:
    names = list(paths)
    if not names:
        return
    inputs = {name: kind for name, kind in table.items() if kind.is_read}
    check_files(
        Namespace(**{**vars(opt), "save_config": names}),
        {**inputs, "config": PathOption.FILE, "save_config": PathOption.OUTPUT},
    )
    with staged([followed(Path(name)) for name in names]) as places:
        with contextlib.redirect_stdout(io.StringIO()):  # OpenNMT-py prints the temporary names
            original(opt, list(map(str, places)))
    print(f"wrote the options to {', '.join(names)}")
    if exit_after:
        parser.exit(0)


# Files


def check_files(opt: Namespace, table: Table) -> None:
    """Check the files that the options of a table name, also those in the option ``data``."""
    named: dict[str, tuple[PathOption, Given]] = {
        name: (kind, getattr(opt, name, None)) for name, kind in table.items()
    }
    models = [file for kind, given in named.values() if kind.is_read for file in _weights_beside(given)]
    named["weights"] = (PathOption.FILE, models)
    corpora = parse_text("data", getattr(opt, "data", None) or "{}", "{corpus: {path_src: train.en}}")
    for name, corpus in corpora.items() if isinstance(corpora, dict) else ():
        for side in ("path_src", "path_tgt", "path_txt", "path_align"):
            if isinstance(corpus, dict) and isinstance(corpus.get(side), str):
                named[f"data: {name}: {side}"] = (PathOption.FILE, corpus[side])
    check_paths(named)


def check_new_model(
    models: Sequence[str], output: str | os.PathLike[str], kind: PathOption, force: bool
) -> None:
    """Check that the output of a command is not one of its input models, nor their safetensors."""
    files = [*models, *_weights_beside(models)]
    check_paths({"models": (PathOption.FILE, files), "output": (kind, output)}, force)


def _weights_beside(given: Given) -> list[str]:
    """Return the safetensors files of those paths that are checkpoints."""
    found: list[str] = []
    for one in [given] if isinstance(given, (str, os.PathLike)) else given or ():
        path = os.fspath(one)
        if path.endswith(".pt") and "\0" not in path:
            with contextlib.suppress(UserError):
                found += safetensors_of(path)
    return found


# Ranges. OpenNMT-py accepts infinity and negative numbers for most options.


@dataclass(frozen=True)
class Range:
    """A range of numbers; NaN and infinity are outside of every range."""

    least: float = 0
    most: float = 2**31 - 1  # by default the largest number of steps, lines or words (32 bits)
    above: bool = False  # exclude `least`
    below: bool = False  # exclude `most`
    unset: tuple[int, ...] = ()  # further values, which disable the option

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


# Larger than any published model; `check_memory` checks what fits this machine.
_WIDEST, _DEEPEST, _MOST_HEADS, _PROCESSES = 2**16, 1000, 1024, 1024
_NAMES_BY_RANGE = (
    # Sizes of models; -1 rotary positions, -2 ALiBi.
    (
        Range(1, _WIDEST),
        "src_word_vec_size tgt_word_vec_size enc_hid_size dec_hid_size lora_rank state_dim "
        "n_edge_types n_node n_steps max_tags vocab_size_multiple",
    ),
    (Range(1, _WIDEST, unset=(-1, 0)), "word_vec_size hidden_size feat_vec_size"),
    (Range(1, 16 * _WIDEST), "transformer_ff"),
    (Range(1, _DEEPEST), "enc_layers dec_layers"),
    (Range(1, _DEEPEST, unset=(-1,)), "layers"),
    (Range(-_DEEPEST, _DEEPEST), "alignment_layer"),
    (Range(1, _MOST_HEADS), "heads num_experts_per_tok"),
    (Range(0, _MOST_HEADS), "num_kv alignment_heads num_experts"),
    (Range(0, _WIDEST, unset=(-1, -2)), "max_relative_positions"),
    (Range(0, _WIDEST), "relative_positions_buckets rotary_dim src_ggnn_size"),
    (Range(0, 1, unset=(-1,)), "feat_vec_exponent"),
    (Range(0, 1, above=True), "norm_eps learning_rate_decay"),
    (Range(1, 999), "cnn_kernel_width"),
    # Probabilities, shares and weights.
    (Range(0, 1, below=True), "lora_dropout dropout attention_dropout label_smoothing adam_beta1 adam_beta2"),
    (
        Range(0, 1),
        "input_feed average_decay term_corpus_ratio term_example_ratio fuzzy_corpus_ratio "
        "tags_corpus_ratio upper_corpus_ratio permute_sent_ratio rotate_ratio insert_ratio random_ratio "
        "mask_ratio src_subword_alpha tgt_subword_alpha random_sampling_topp",
    ),
    (
        Range(0, math.inf, below=True),
        "lambda_align lambda_coverage lm_prior_lambda loss_scale learning_rate "
        "max_grad_norm adagrad_accumulator_init param_init switchout_temperature tokendrop_temperature "
        "tokenmask_temperature avg_tok_min avg_tok_max ratio random_sampling_temp beta max_length_ratio",
    ),
    (Range(0, math.inf, above=True, below=True), "lm_prior_tau"),
    (Range(0, 100, above=True), "poisson_lambda"),  # larger values overflow
    (Range(-10, 10), "alpha"),  # an exponent of lengths; larger values overflow
    (Range(0, 100), "fuzzy_threshold n_src_feats"),
    # Counts.
    (
        Range(1),
        "rotary_theta lora_alpha decay_steps average_every accum_count valid_steps report_every "
        "prefetch_factor world_size timeout batch_size valid_batch_size batch_size_multiple bucket_size "
        "src_vocab_size tgt_vocab_size src_seq_length_trunc tgt_seq_length_trunc src_seq_length "
        "tgt_seq_length learn_subwords_size vocab_sample_queue_size src_tgt_ratio",
    ),
    (
        Range(),
        "sliding_window start_decay_steps warmup_steps accum_steps dropout_steps truncated_decoder "
        "train_steps save_checkpoint_steps early_stopping gpu_ranks gpu_verbose_level bucket_size_increment "
        "src_words_min_frequency tgt_words_min_frequency src_vocab_threshold tgt_vocab_threshold "
        "fuzzymatch_min_length fuzzymatch_max_length doc_length max_context min_length block_ngram_repeat",
    ),
    (
        Range(unset=(-1,)),
        "keep_checkpoint gpu bucket_size_init n_sample src_subword_nbest tgt_subword_nbest "
        "random_sampling_topk",
    ),
    (Range(1, 1000), "beam_size n_best"),  # each beam needs a row of scores of the whole vocabulary
    (Range(1, 1_000_000), "max_length"),
    # NumPy's seeds have 32 bits; -1 and 0 draw a random seed.
    (Range(0, 2**32 - 1, unset=(-1,)), "seed"),
    (Range(0, _PROCESSES), "num_workers"),
    (Range(1, _PROCESSES), "num_threads"),
    (Range(1, 2**16 - 1), "master_port"),
)
RANGES = {name: allowed for allowed, names in _NAMES_BY_RANGE for name in names.split()}


def known_names() -> dict[str, tuple[str, ...]]:
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
    """Check all numbers and names among the options."""

    def values(name: str) -> list[Any]:
        value = getattr(opt, name, None)
        return value if isinstance(value, list) else [] if value is None else [value]

    for name, allowed in RANGES.items():
        for number in values(name):
            if not allowed.contains(number):
                raise UserError(f"{name}: {allowed.describe_error(number)}")
    for name, choices in known_names().items():
        if name == "encoder_type" and getattr(opt, "model_task", "seq2seq") == "lm":
            continue  # a language model has no encoder
        for value in values(name):
            if value not in choices:
                raise UserError(f"{name}: {value!r} is unknown; use {' or '.join(filter(None, choices))}")


# Training


def check_training(opt: Namespace) -> None:
    """Check the numbers, names, schedules and processes of ``onmt_train``."""
    check_ranges(opt)
    if opt.decay_method in ("noam", "noamwd", "rsqrt") and opt.warmup_steps < 1:
        raise UserError(f"warmup_steps: {opt.warmup_steps} is too small; decay_method needs at least 1")
    for name in ("accum_steps", "dropout_steps"):
        steps = getattr(opt, name)
        if steps[0] != 0 or sorted(set(steps)) != steps:
            raise UserError(f"{name}: {steps} is not an increasing list of steps from 0, such as [0, 5000]")
    if opt.copy_attn and opt.model_task == "lm":
        raise UserError("copy_attn: true needs a source to copy from, which model_task: lm lacks; remove it")
    if opt.generator_function != "softmax":
        raise UserError(f"generator_function: {opt.generator_function} does not work in search; use softmax")
    if opt.world_size > 1 and not opt.gpu_ranks:
        raise UserError(f"world_size: {opt.world_size}, but gpu_ranks is empty; set it, such as [0, 1]")
    if opt.gpu_ranks and not torch.cuda.is_available() and opt.gpu_backend != "gloo":
        raise UserError(
            f"gpu_ranks: {opt.gpu_ranks}, but torch finds no CUDA device; remove gpu_ranks and "
            "world_size, or set gpu_backend: gloo to train several processes on the CPU"
        )
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and len(opt.gpu_ranks) > gpus:
        raise UserError(f"gpu_ranks: {opt.gpu_ranks}, but torch finds {gpus} CUDA devices; set one for each")


def check_optimizer(opt: Namespace) -> None:
    """Check that gradients can be clipped."""
    if opt.optim == "sparseadam" and opt.max_grad_norm:
        raise UserError(
            f"max_grad_norm: {opt.max_grad_norm} does not work with optim: sparseadam, because torch has no "
            "norm of sparse gradients; set max_grad_norm: 0"
        )


def check_counting(opt: Namespace) -> None:
    """Check the numbers and names of ``onmt_build_vocab``."""
    check_ranges(opt)
    if opt.n_sample in (0, 1):
        raise UserError(f"n_sample: {opt.n_sample} is too small; expected at least 2, or -1 for all lines")
    if opt.learn_subwords and opt.src_subword_type == "none":
        raise UserError("learn_subwords: needs src_subword_type: bpe or sentencepiece; set it")


# Models


def check_model_sizes(opt: Namespace) -> None:
    """Check that the sizes of a new model are consistent, after upstream's ``update_model_opts``."""
    parts = [opt.decoder_type] if opt.model_task == "lm" else [opt.encoder_type, opt.decoder_type]
    sides = {
        "src": (opt.encoder_type, opt.src_word_vec_size, opt.enc_hid_size, opt.n_src_feats),
        "tgt": (opt.decoder_type, opt.tgt_word_vec_size, opt.dec_hid_size, 0),
    }
    if opt.model_task == "lm":
        del sides["src"]
    for side, (kind, width, hidden, features) in sides.items():
        if kind in ("transformer", "transformer_lm", "mean") and width != hidden and not features:
            raise UserError(
                f"{side}_word_vec_size: {width} differs from hidden_size {hidden}, which a {kind} does not "
                "support; set word_vec_size equal to hidden_size"
            )
    if opt.share_embeddings and opt.src_word_vec_size != opt.tgt_word_vec_size:
        raise UserError(
            f"share_embeddings: true needs one width, but src_word_vec_size is {opt.src_word_vec_size} and "
            f"tgt_word_vec_size {opt.tgt_word_vec_size}; set word_vec_size"
        )
    if any(part in ("transformer", "transformer_lm") for part in parts):
        _check_heads(opt)
    if "brnn" in parts and opt.enc_hid_size % 2:
        raise UserError(f"hidden_size: {opt.enc_hid_size} is odd; encoder_type: brnn needs an even number")
    if ("cnn" in parts and set(parts) != {"cnn"}) or parts == ["transformer", "rnn"]:
        raise UserError(
            f"encoder_type: {opt.encoder_type} does not work with decoder_type: {opt.decoder_type}; use the "
            "same type for both"
        )
    if opt.encoder_type == "cnn" and "cnn" in parts and opt.cnn_kernel_width % 2 == 0:
        raise UserError(f"cnn_kernel_width: {opt.cnn_kernel_width} is even; cnn needs an odd number")
    if opt.decay_method in ("noam", "noamwd") and opt.hidden_size < 1:
        raise UserError(f"decay_method: {opt.decay_method} needs hidden_size; set it, not enc/dec_hid_size")


def _check_heads(opt: Namespace) -> None:
    hidden, heads = opt.dec_hid_size, opt.heads
    if hidden % heads:
        raise UserError(f"heads: {heads} does not divide hidden_size {hidden}; change one of them")
    if opt.num_kv and heads % opt.num_kv:
        raise UserError(f"num_kv: {opt.num_kv} does not divide heads {heads}; change one of them")
    if opt.alignment_heads > heads:
        raise UserError(f"alignment_heads: {opt.alignment_heads} is more than heads {heads}; lower it")
    experts, chosen = opt.num_experts, opt.num_experts_per_tok
    if experts and chosen > experts:
        raise UserError(f"num_experts_per_tok: {chosen} is more than num_experts {experts}; lower it")
    width = hidden // heads
    if opt.max_relative_positions == -1 and (opt.rotary_dim > width or (opt.rotary_dim or width) % 2):
        raise UserError(
            f"rotary_dim: {opt.rotary_dim or width} must be even and at most the {width} dimensions of a "
            "head (hidden_size / heads); change it, or heads"
        )
    if opt.relative_positions_buckets and opt.max_relative_positions < 1:
        raise UserError("relative_positions_buckets: needs max_relative_positions; set the largest distance")


def check_memory(opt: Namespace, vocabs: dict[str, Any]) -> None:
    """Check that memory suffices for the parameters of a new model and their gradients."""
    from onmt.model_builder import build_base_model

    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if opt.gpu_ranks and torch.cuda.is_available():
        room = int(torch.cuda.get_device_properties(0).total_memory)
    gigabytes = "{:,.1f} GiB".format
    try:
        with torch.device("meta"):
            model = build_base_model(opt, vocabs)
        count = sum(parameter.numel() for parameter in model.parameters())
        needed = 8 * count  # a parameter and its gradient, in single precision
        found = f"{count:,} parameters, which need {gigabytes(needed / 2**30)} with gradients"
    except RuntimeError as error:
        # OpenNMT-py allocates some tensors on the CPU regardless of the default device.
        if "allocate memory" not in str(error):
            raise
        needed, found = room + 1, "too many parameters to count"
    if needed > room:
        raise UserError(
            f"the model has {found}, but memory is {gigabytes(room / 2**30)}; reduce hidden_size, "
            "transformer_ff, layers or the vocabulary"
        )


# Translation


def check_translation(opt: Namespace) -> None:
    """Check the numbers and names of ``onmt_translate`` and of a model of ``onmt_server``."""
    check_ranges(opt)
    if opt.n_best > opt.beam_size:
        raise UserError(f"n_best: {opt.n_best} is more than beam_size {opt.beam_size}; change one of them")
    if opt.min_length > opt.max_length:
        raise UserError(
            f"min_length: {opt.min_length} is more than max_length {opt.max_length}; change one of them"
        )
    if opt.phrase_table and not opt.replace_unk:
        raise UserError("phrase_table: has no effect without replace_unk; set replace_unk, or remove it")
    if opt.phrase_table:
        _check_phrase_table(opt.phrase_table)
    if opt.world_size > 1:
        raise UserError(f"world_size: {opt.world_size}, but a translation runs in one process; remove it")


_SEPARATOR = "|||"  # of phrase tables


def _check_phrase_table(path: str) -> None:
    """Check that each line is a source word, the separator and a target word."""
    lines = Path(path).read_bytes().decode("utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        if line.count(_SEPARATOR) != 1:
            raise UserError(f"phrase_table: line {number} of {path} is not like 'source|||target'; fix it")


def check_prefix(opt: Namespace) -> None:
    """Check that ``tgt_file_prefix`` has prefixes, once the transforms are known."""
    if opt.tgt_file_prefix and not opt.tgt and not ("prefix" in opt.transforms and opt.tgt_prefix):
        raise UserError("tgt_file_prefix: needs a file of target prefixes; name it with -tgt")


def check_gpu(opt: Namespace) -> None:
    """Check that the GPU of a translation exists."""
    if opt.gpu >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise UserError(f"gpu: {opt.gpu}, but torch finds {found} CUDA devices; remove it, or set it to -1")


# Translation options that need attention to a source, and the values that disable them.
_ATTENDING = {"replace_unk": False, "attn_debug": False, "coverage_penalty": "none", "report_align": False}


def check_translator(opt: Namespace, model: Any, vocabs: Mapping[str, Any]) -> None:
    """Check the options of a translation against the model and its vocabularies."""
    words = len(vocabs["tgt"])
    for name in ("random_sampling_topk", "beam_size"):
        if (asked := getattr(opt, name)) > words:
            raise UserError(f"{name}: {asked} is more than the {words} words of the vocabulary; lower it")
    for name, unset in _ATTENDING.items():
        if not hasattr(model, "encoder") and getattr(opt, name) != unset:
            raise UserError(f"{name}: needs attention to a source, which this model lacks; remove it")
    if opt.dump_beam:
        raise UserError("dump_beam: is not supported by OpenNMT-py 3; remove it")
    if opt.align_debug and not opt.report_align:
        raise UserError("align_debug: needs report_align; set it")
    for part in getattr(model.decoder, "model_decoders", [model.decoder]) if opt.report_align else ():
        layers, wanted = len(getattr(part, "transformer_layers", ())), getattr(part, "alignment_layer", 0)
        if not -layers <= wanted < layers:
            raise UserError(
                f"report_align: uses the attention of decoder layer {wanted} (alignment_layer), but this "
                f"model has {layers} Transformer layers; remove it, or use attn_debug"
            )
    trained = len(vocabs.get("src_feats") or ())
    if opt.n_src_feats != trained:
        raise UserError(
            f"n_src_feats: is {opt.n_src_feats}, but the model was trained with {trained}; set it, "
            "src_feats_defaults and transforms as in training"
        )
