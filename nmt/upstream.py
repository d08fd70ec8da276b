"""The only module that replaces anything inside ``onmt``; what goes in place of its searches is `nmt.search`.

The seams, which `install` puts in place once per process (``*``: also where other modules imported the name):

==========================================  ================================================================
seam                                        why
==========================================  ================================================================
opts.model_opts                             adds ``embedding``, ``src_embedding``, ``tgt_embedding``,
                                            ``output_embedding``, ``embedding_distillation`` and
                                            ``decoder_positions``
opts._add_train_general_opts                adds ``autocast``
model_builder.build_base_model              puts shared embeddings in, tied as modules, and positions
                                            that know the length of the output
model_builder.build_model *                 shared embeddings initialise themselves, last
models.model.BaseModel.load_state_dict      tied tensors are stored once, position tables not at all;
                                            copy generators are found
models.model.BaseModel.load_safe_state_dict likewise; upstream finds files in shards only
models.model_saver.load_checkpoint *        reads without running code; one clear line for a bad file
models.model_saver.ModelSaver._save         written all at once; keeps the position in the data
models.model_saver.ModelSaver._st_save      likewise
utils.loss.LossCompute.forward              cross entropy without the N x V scores
bin.train.single_main                       `nmt.training.run`
bin.train.spawned_train                     spawned processes import this package before upstream
inputters.dynamic_iterator.DynamicDataset… likewise the workers of a data loader
inputters.text_corpus.ParallelCorpus        white space of every kind, empty lines, bad UTF-8
inputters.text_utils.parse_features *       text without features may hold the mark in front of them
inputters.inputter._read_vocab_file         errors that name the file and the line
modules.embeddings.PositionalEncoding       sentences longer than its table get a longer one
utils.misc.use_gpu *                        several processes on a CPU over gloo
train_single.configure_process              likewise
inputters.dynamic_iterator.build_… *        likewise: batches stay on the CPU
utils.distributed.all_gather_list *         likewise: upstream's works on a GPU only
utils.distributed.all_reduce_and_rescale_…  gradients of several processes count in full
utils.earlystopping.EarlyStopping.has_st…   of several processes, none stops alone
trainer.Trainer._accum_batches              likewise
transforms.clean.CleanTransform.warm_up    says what is missing where there is no fasttext or no network
translate.TranslationBuilder.from_batch      scores of beam search can be written, too
inference_engine.InferenceEnginePY          models with copy attention translate
translate.translation_server.textbatch_t…    likewise, of a server
modules.copy_generator.CopyGenerator        copy attention takes the rows of a batch sentence by sentence
utils.loss.collapse_copy_scores             likewise
utils.loss.LossCompute._unbottle            likewise
utils.loss.LossCompute._compute_coverage_…  likewise; `lambda_coverage` counts
decoders.decoder.InputFeedRNNDecoder        attention has the sentences first, as in all other decoders
translate.translator.Translator._translat…  sentences that are left in a search keep their own words
translate.translator.Translator._decode_a…  likewise
opts.translate_opts *                       adds ``desired_length`` and ``desired_lengths``
translate.translator.build_translator *     its lengths are checked against the model, its GPU is there,
                                            and so is what it is to report
translate.beam_search.BeamSearchBase        what is forbidden and how long sources are follows the sentences
                                            that are left
translate.greedy_search.GreedySearch        `block_ngram_repeat` works
translate.decode_strategy.DecodeStrategy    likewise for single words
translate.penalties.PenaltyBuilder          coverage is that of words, not of padding
translate.translator.Translator.translate…  each batch asks for its own lengths
models.model.NMTModel.forward               in training, those of its targets
decoders.transformer.Transformer…init_state lengths follow the rows of the decoder's state
decoders.transformer.Transformer…map_state  likewise
==========================================  ================================================================
"""

from __future__ import annotations

import copy
import functools
import os
import urllib.error
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import onmt.bin.average_models
import onmt.bin.build_vocab
import onmt.bin.release_model
import onmt.bin.server
import onmt.bin.train
import onmt.bin.translate
import onmt.decoders.decoder
import onmt.decoders.ensemble
import onmt.decoders.transformer
import onmt.inference_engine
import onmt.inputters
import onmt.inputters.dynamic_iterator
import onmt.inputters.inputter
import onmt.inputters.text_corpus
import onmt.inputters.text_utils
import onmt.model_builder
import onmt.models.model
import onmt.models.model_saver
import onmt.modules.embeddings
import onmt.opts
import onmt.train_single
import onmt.trainer
import onmt.transforms.clean
import onmt.translate.beam_search
import onmt.translate.decode_strategy
import onmt.translate.greedy_search
import onmt.translate.penalties
import onmt.translate.translation_server
import onmt.translate.translator
import onmt.utils
import onmt.utils.distributed
import onmt.utils.earlystopping
import onmt.utils.loss
import onmt.utils.misc
import onmt.utils.scoring_utils
import torch
from onmt.models.model_saver import vocabs_to_dict
from onmt.modules.copy_generator import CopyGenerator
from onmt.utils.logging import logger
from torch import Tensor, nn

from nmt import distillation, search
from nmt.checkpoint import load_weights, read_safetensors, write_step
from nmt.checks import check_attention, check_gpu, check_reports
from nmt.data import Batches, CleanCorpus
from nmt.errors import UserError
from nmt.files import allow_checkpoint_types, reading_checkpoint, split_generator, with_plain_tensors
from nmt.model import (
    SharedGenerator,
    fill_aliases,
    insert_embeddings,
    options_without_files,
    reset_embeddings,
    shared_embeddings_of,
)
from nmt.plan import EXAMPLE, OPTION_NAMES, check_combinations, check_sizes, read_plan
from nmt.summarization import length_control
from nmt.summarization.positions import LengthControlledPositions
from nmt.vocabulary import read_vocabulary
from shared_embeddings.dropout import Dropout

_installed = False


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute of an upstream module or class by what ``make`` returns for the original."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def _replace_everywhere(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function in the module that defines it and in every loaded module that has imported it by
    name.
    """
    import sys

    original = getattr(owner, name)
    replacement = functools.wraps(original)(make(original))
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("onmt") and module.__dict__.get(name) is original:
            setattr(module, name, replacement)


def install() -> None:
    """Put all seams in place; a second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    allow_checkpoint_types()
    _replace(onmt.opts, "model_opts", _with_embedding_options)
    _replace(onmt.opts, "_add_train_general_opts", _with_autocast_option)
    _replace(onmt.model_builder, "build_base_model", _with_shared_embeddings)
    _replace(onmt.model_builder, "build_base_model", _with_length_control)
    _replace(onmt.model_builder, "build_base_model", _with_quick_dropout)
    _replace_everywhere(onmt.model_builder, "build_model", _with_own_initialisation)
    _replace(onmt.models.model.BaseModel, "load_state_dict", _loading_ties_once)
    _replace(onmt.models.model.BaseModel, "load_safe_state_dict", _loading_safetensors)
    _replace_everywhere(onmt.models.model_saver, "load_checkpoint", _reading_safely)
    _replace(onmt.models.model_saver.ModelSaver, "_save", _saving_atomically)
    _replace(onmt.models.model_saver.ModelSaver, "_st_save", _saving_atomically)
    _replace(onmt.utils.loss.LossCompute, "forward", _with_chunked_loss)
    onmt.bin.train.single_main = run_training_process
    onmt.bin.train.spawned_train = spawned_training
    onmt.inputters.dynamic_iterator.DynamicDatasetIter = Batches
    onmt.inputters.text_corpus.ParallelCorpus = CleanCorpus
    _replace_everywhere(onmt.inputters.text_utils, "parse_features", _only_with_features)
    onmt.inputters.inputter._read_vocab_file = read_vocabulary
    _replace(onmt.modules.embeddings.PositionalEncoding, "forward", _with_growing_table)
    _replace_everywhere(onmt.utils.misc, "use_gpu", _only_with_cuda)
    _replace(onmt.train_single, "configure_process", _configuring_any_device)
    _replace_everywhere(
        onmt.inputters.dynamic_iterator, "build_dynamic_dataset_iter", _with_batches_on_device
    )
    _replace_everywhere(onmt.utils.distributed, "all_gather_list", _gathering_on_any_device)
    _replace(onmt.utils.distributed, "all_reduce_and_rescale_tensors", _summing_gradients)
    _replace(onmt.utils.earlystopping.EarlyStopping, "has_stopped", _leaving_the_end_to_all)
    _replace(onmt.trainer.Trainer, "_accum_batches", _ending_together)
    _replace(onmt.transforms.clean.CleanTransform, "warm_up", _with_clear_needs)
    _replace(onmt.translate.TranslationBuilder, "from_batch", _with_written_scores)
    _replace(onmt.inference_engine.InferenceEnginePY, "_translate", search.with_copied_words)
    _replace(onmt.translate.translation_server, "textbatch_to_tensor", search.with_copied_words_of_requests)
    _replace(CopyGenerator, "forward", search.copying_by_sentence)
    _replace(onmt.utils.loss, "collapse_copy_scores", search.collapsing_by_sentence)
    _replace(onmt.utils.loss.LossCompute, "_unbottle", search.with_sentences_first)
    _replace(onmt.utils.loss.LossCompute, "_compute_coverage_loss", search.covering_by_sentence)
    _replace(onmt.decoders.decoder.InputFeedRNNDecoder, "forward", search.attending_by_sentence)
    translator = onmt.translate.translator.Translator
    _replace(translator, "_translate_batch_with_strategy", search.knowing_the_search)
    _replace(translator, "_decode_and_generate", search.copying_in_search)
    beams, greedy = onmt.translate.beam_search.BeamSearchBase, onmt.translate.greedy_search.GreedySearch
    _replace(beams, "beams_non_finished", search.with_length_of_sentence)
    _replace(beams, "update_finished", search.forbidding_in_beams)
    _replace(
        onmt.translate.decode_strategy.DecodeStrategy, "block_ngram_repeats", search.forbidding_single_words
    )
    _replace(greedy, "advance", search.remembering_what_was_said)
    _replace(greedy, "update_finished", search.forbidding_in_greedy_search)
    _replace(onmt.translate.penalties.PenaltyBuilder, "coverage_wu", search.covering_words)
    _replace_everywhere(onmt.opts, "translate_opts", _with_length_options)
    _replace_everywhere(onmt.translate.translator, "build_translator", _with_desired_lengths)
    _replace(onmt.translate.translator.Translator, "translate_batch", _asking_desired_lengths)
    _replace(onmt.models.model.NMTModel, "forward", _asking_target_lengths)
    decoder = onmt.decoders.transformer.TransformerDecoderBase
    _replace(decoder, "init_state", _starting_with_lengths)
    _replace(decoder, "map_state", _with_lengths_following)


def run_training_process(opt: Namespace, device_id: int) -> None:
    """Train in this process; the entry point of spawned processes, which start without seams.

    A group of processes is left at the end: what torch tears down as the interpreter ends may abort a process
    whose peers have gone already.
    """
    install()
    from nmt.training import run

    run(opt, device_id)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def spawned_training(process: Callable[..., None], opt: Namespace, device_id: int, errors: Any) -> None:
    """Be one of several training processes; what a new process unpickles first has to be of this package."""
    onmt.utils.distributed.spawned_train(process, opt, device_id, errors)


def build_for_inference(path: str) -> tuple[nn.Module, dict[str, Any], Namespace, dict[str, Any]]:
    """Return model (CPU, evaluation), vocabularies, options and checkpoint of a file.

    Raises:
        UserError: the checkpoint cannot be read or does not fit its own options.
    """
    from onmt.inputters.inputter import dict_to_vocabs
    from onmt.utils.parse import ArgumentParser

    install()
    checkpoint = onmt.model_builder.load_checkpoint(path)
    options = ArgumentParser.ckpt_model_opts(checkpoint["opt"])
    ArgumentParser.update_model_opts(options)
    vocabs = dict_to_vocabs(checkpoint["vocab"])
    model = onmt.model_builder.build_base_model(options, vocabs)
    if "model" in checkpoint:
        parts = {name: dict(checkpoint[name] or {}) for name in ("model", "generator")}
        model.load_state_dict(parts)
    else:
        model.load_safe_state_dict(path.removesuffix(".pt"))
    return model.eval(), vocabs, options, checkpoint


def _with_embedding_options(original: Any) -> Any:
    """Add the options of shared embeddings, their distillation and length control to those of a model."""

    def model_opts(parser: Any) -> None:
        original(parser)
        group = parser.add_argument_group("Shared embeddings")
        help_texts = {
            "embedding": "Embedding of source, target and (with share_decoder_embeddings) output, as "
            "a mapping",
            "src_embedding": "Embedding of the source, where it differs",
            "tgt_embedding": "Embedding of the target, where it differs",
            "output_embedding": "Embedding of an output layer of its own (without share_decoder_embeddings)",
        }
        for name in OPTION_NAMES:
            text = f"{help_texts[name]}, such as '{EXAMPLE}'; `shared-embeddings methods` lists them all"
            group.add_argument(f"--{name}", f"-{name}", default=None, metavar="MAPPING", help=text)
        group.add_argument(
            f"--{distillation.OPTION}",
            f"-{distillation.OPTION}",
            default=None,
            metavar="MAPPING",
            help=f"Start from a trained model and fit the embedding to its table, such as "
            f"'{distillation.EXAMPLE}'",
        )
        length_control.add_model_options(parser)

    return model_opts


def _with_autocast_option(original: Any) -> Any:
    """Add the option for mixed precision to the options of training."""

    def add_train_general_opts(parser: Any) -> None:
        original(parser)
        group = parser.add_argument_group("Mixed precision")
        group.add_argument(
            "--autocast",
            "-autocast",
            choices=["none", "bf16"],
            default="none",
            help="Run matrix products in bfloat16, on a GPU or CPU that is quick at it; parameters, sums and "
            "optimiser stay in 32 bits",
        )

    return add_train_general_opts


def autocast_model(model: Any, losses: Any, device: torch.device) -> None:
    """Run a model and its losses under bfloat16 autocast, each call in a context of its own.

    One context around the whole training would keep the weights of its first step: autocast caches them.
    """
    for module in (model, *losses):
        module.forward = torch.autocast(device.type, torch.bfloat16)(module.forward)


def _with_shared_embeddings(original: Any) -> Any:
    """Build the model with plain, untied tables, and put the planned embeddings in their place."""

    def build_base_model(model_opt: Namespace, vocabs: dict[str, Any]) -> nn.Module:
        plan = read_plan(model_opt)
        if plan is None:
            return original(model_opt, vocabs)  # type: ignore[no-any-return]
        check_combinations(plan, model_opt)
        check_sizes(plan, model_opt, vocabs)
        untied = copy.copy(model_opt)
        untied.share_embeddings = False
        untied.share_decoder_embeddings = model_opt.share_decoder_embeddings and plan.target is None
        model: nn.Module = original(untied, vocabs)
        insert_embeddings(model, plan, model_opt, vocabs)
        return model

    return build_base_model


def _with_quick_dropout(original: Any) -> Any:
    """Let all layers drop by way of masks that a CPU draws quickly; torch's own take a sixth of its time."""

    def build_base_model(model_opt: Namespace, vocabs: dict[str, Any]) -> nn.Module:
        model: nn.Module = original(model_opt, vocabs)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Dropout:
                    setattr(module, name, Dropout(child.p))
        return model

    return build_base_model


def _with_own_initialisation(original: Any) -> Any:
    """Let the shared embeddings of a new model initialise themselves after the host has initialised
    everything.
    """

    def build_model(
        model_opt: Namespace, opt: Namespace, vocabs: Any, checkpoint: Any, device_id: int
    ) -> nn.Module:
        model: nn.Module = original(model_opt, opt, vocabs, checkpoint, device_id)
        if checkpoint is None:
            reset_embeddings(model)
        return model

    return build_model


def _loading_ties_once(original: Any) -> Any:
    """Load models with shared embeddings from checkpoints that hold each tensor once.

    Those with a copy generator as well, whose tensors upstream looks for under other names than it writes.
    """

    def load_state_dict(
        self: nn.Module,
        checkpoint: dict[str, Any],
        precision: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        strict: bool = True,
        offset: int = 0,
    ) -> None:
        if not (shared_embeddings_of(self) or isinstance(self.generator, CopyGenerator)):
            original(self, checkpoint, precision, torch.device(device), strict, offset)
            return
        load_weights(self, checkpoint["model"], checkpoint.get("generator"))
        if precision != torch.int8:
            self.to(precision)
        self.to(device)

    return load_state_dict


def _loading_safetensors(original: Any) -> Any:
    """Load weights that lie apart, from one file or several."""

    def load_safe_state_dict(
        self: Any,
        model_path: str,
        precision: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        strict: bool = True,
        offset: int = 0,
    ) -> None:
        body, head = split_generator(fill_aliases(self, read_safetensors(f"{model_path}.pt")))
        parts = {"model": body, "generator": head}
        self.load_state_dict(
            parts, precision=precision, device=torch.device(device), strict=strict, offset=offset
        )

    return load_safe_state_dict


def _reading_safely(original: Any) -> Any:
    """Say clearly what is wrong with a checkpoint that upstream cannot read."""

    def load_checkpoint(ckpt_path: str | None) -> dict[str, Any] | None:
        if not ckpt_path:
            return None
        with reading_checkpoint(ckpt_path):
            return with_plain_tensors(original(ckpt_path))

    return load_checkpoint


def _saving_atomically(original: Any) -> Any:
    """Write a checkpoint all at once, with the state that an exact resumption needs."""

    def save(self: Any, step: int, model: nn.Module) -> tuple[str | None, str | None]:
        partial = getattr(self.model_opt, "lora_layers", None) or getattr(
            self.model_opt, "lora_embedding", False
        )
        if partial or getattr(self.model_opt, "parallel_mode", "") == "tensor_parallel":
            return original(self, step, model)  # type: ignore[no-any-return]
        resume_state = getattr(self, "resume_state", None)
        saved = {
            "vocab": vocabs_to_dict(self.vocabs),
            "opt": options_without_files(self.model_opt, model),
            "optim": self.optim.state_dict(),
            "resume": resume_state() if resume_state else None,
        }
        distributed = torch.distributed.is_initialized()
        files: tuple[str | None, str | None] = (None, None)
        if not distributed or torch.distributed.get_rank() == 0:
            logger.info(f"Saving checkpoint {self.base_path}_step_{step}.pt")
            files = write_step(model, saved, f"{self.base_path}_step_{step}", self.save_format)
        if distributed:
            torch.distributed.barrier()
        return files

    return save


def _with_chunked_loss(original: Any) -> Any:
    """Compute the loss of a shared output layer without building all scores at once.

    Losses that need the scores themselves (language model priors, sparsemax, alignment, coverage) go
    upstream's way.
    """

    def forward(
        self: Any,
        batch: dict[str, Any],
        output: Tensor,
        attns: Any,
        trunc_start: int = 0,
        trunc_size: int | None = None,
    ) -> Any:
        plain = (
            isinstance(self.generator, SharedGenerator)
            and isinstance(self.criterion, nn.CrossEntropyLoss)
            and self.lambda_align == 0.0
            and self.lambda_coverage == 0.0
            and self.lm_generator is None
            and self.lm_prior_model is None
        )
        if not plain:
            return original(self, batch, output, attns, trunc_start, trunc_size)
        size = batch["tgt"].size(1) - trunc_start if trunc_size is None else trunc_size
        first, last = trunc_start + self.tgt_shift_index, trunc_start + size
        targets = batch["tgt"][:, first:last, 0].reshape(-1)  # (N,)
        hidden = output.reshape(-1, output.size(-1))  # (N, D)
        loss, predictions = self.generator.loss_and_predictions(
            hidden,
            targets,
            ignore_index=self.criterion.ignore_index,
            label_smoothing=self.criterion.label_smoothing,
            reduction="sum",
        )
        real = targets.ne(self.criterion.ignore_index)
        sentences = len(batch["srclen"]) if trunc_start == 0 else 0
        statistics = onmt.utils.Statistics(
            loss=loss.item(),
            n_batchs=1 if sentences else 0,
            n_sents=sentences,
            n_words=int(real.sum()),
            n_correct=int((predictions.eq(targets) & real).sum()),
        )
        return loss, statistics

    return forward


def _only_with_features(original: Any) -> Any:
    """Take a line as it is where no features are asked for; upstream refuses the mark that separates them."""

    def parse_features(line: str, n_feats: int = 0, defaults: Any = None) -> tuple[str, list[str] | None]:
        if n_feats == 0:
            return line.strip("\n"), None
        return original(line, n_feats, defaults)  # type: ignore[no-any-return]

    return parse_features


def _with_growing_table(original: Any) -> Any:
    """Extend the sinusoids when a sentence is longer than their table."""

    def forward(self: Any, emb: Tensor, step: int | None = None) -> Tensor:
        needed = (step or 0) + emb.size(1)
        if needed > self.pe.size(0):
            kind = "SinusoidalConcat" if _is_concatenated(self.pe) else "SinusoidalInterleaved"
            longer = type(self)(self.dim, kind, max_len=2 * needed)
            self.pe = longer.pe.to(self.pe)
        return original(self, emb, step)  # type: ignore[no-any-return]

    return forward


def _is_concatenated(table: Tensor) -> bool:
    """Say whether a table ``(T, 1, D)`` has its sines first; interleaved ones have a cosine of 0 in
    column 1.
    """
    return table.size(-1) > 2 and float(table[0, 0, 1]) == 0.0


def _only_with_cuda(original: Any) -> Any:
    """Several processes may train on a CPU over gloo: ranks alone do not mean that there is a GPU."""

    def use_gpu(opt: Namespace) -> bool:
        on_cpu = getattr(opt, "gpu_backend", "") == "gloo" and not torch.cuda.is_available()
        return not on_cpu and bool(original(opt))

    return use_gpu


def _configuring_any_device(original: Any) -> Any:
    """Choose the GPU of a process where there is one, and seed everything."""

    def configure_process(opt: Namespace, device_id: int) -> None:
        if device_id >= 0 and not torch.cuda.is_available():
            onmt.utils.misc.set_random_seed(opt.seed, False)
        else:
            original(opt, device_id)

    return configure_process


def _with_batches_on_device(original: Any) -> Any:
    """Keep batches on the CPU where there is no GPU."""

    def build_dynamic_dataset_iter(*args: Any, device_id: int = -1, **kwargs: Any) -> Any:
        return original(*args, device_id=device_id if torch.cuda.is_available() else -1, **kwargs)

    return build_dynamic_dataset_iter


def _gathering_on_any_device(original: Any) -> Any:
    """Gather Python objects over whichever backend there is."""

    def all_gather_list(data: Any, max_size: int = 4096) -> list[Any]:
        del max_size  # a limit of upstream's buffers only
        results: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(results, data)
        return results

    return all_gather_list


def _summing_gradients(original: Any) -> Any:
    """Add up the gradients of several processes; each is divided by the tokens of all of them already."""

    def all_reduce(tensors: list[Tensor], rescale_denom: float, buffer_size: int = 104857600) -> None:
        del rescale_denom  # the number of processes, by which upstream divides once more
        original(tensors, 1.0, buffer_size)

    return all_reduce


def _leaving_the_end_to_all(original: Any) -> Any:
    """Do not let the first process, which alone validates, leave the others waiting for it."""

    def has_stopped(self: Any) -> bool:
        self.ends = original(self)
        return self.ends and not torch.distributed.is_initialized()

    return has_stopped


def _ending_together(original: Any) -> Any:
    """End the batches of all processes when early stopping has ended training in one."""

    def accum_batches(self: Any, iterator: Any) -> Any:
        stopper = self.earlystopper if torch.distributed.is_initialized() else None
        for item in original(self, iterator):
            step = self.optim.training_step
            yield item
            if stopper is not None and step % self.valid_steps == 0:
                ends = onmt.utils.distributed.all_gather_list(getattr(stopper, "ends", False))
                if any(ends):
                    return

    return accum_batches


def _with_clear_needs(original: Any) -> Any:
    """Say what the transform `clean` lacks: fasttext, or the model of it that upstream downloads."""

    def warm_up(self: Any, vocabs: Any = None) -> None:
        needed = onmt.transforms.clean.fasttext
        if needed.__spec__.origin is None:
            needed.load_model()  # a stand-in, which refuses
        try:
            original(self, vocabs)
        except urllib.error.URLError as error:
            folder = os.path.dirname(onmt.transforms.clean.__file__)
            raise UserError(
                f"transforms: clean: its language model lid.176.ftz cannot be downloaded ({error.reason}); "
                f"put the file into {folder}, or leave the transform out"
            ) from error

    return warm_up


class Score(float):
    """A number that also answers as a tensor of one element does; upstream's writer expects that."""

    def item(self) -> float:
        """Return the number."""
        return float(self)


def _with_written_scores(original: Any) -> Any:
    """Let ``-with_score`` write the scores of beam search, which are numbers, as well as those of greedy
    search.
    """

    def from_batch(self: Any, translation_batch: Any) -> Any:
        translations = original(self, translation_batch)
        for translation in translations:
            scores = translation.pred_scores
            translation.pred_scores = [
                Score(score) if isinstance(score, float) else score for score in scores
            ]
        return translations

    return from_batch


def _with_length_control(original: Any) -> Any:
    """Give the decoder positions that know the length of the output, where the options ask for them."""

    def build_base_model(model_opt: Namespace, vocabs: dict[str, Any]) -> nn.Module:
        length_control.check_positions(model_opt)
        model: nn.Module = original(model_opt, vocabs)
        length_control.insert_positions(model, model_opt)
        return model

    return build_base_model


def _with_length_options(original: Any) -> Any:
    """Add the desired lengths to the options of translation."""

    def translate_opts(parser: Any) -> None:
        original(parser)
        length_control.add_translation_options(parser)

    return translate_opts


def _with_desired_lengths(original: Any) -> Any:
    """Tell a translator the lengths that the options ask for; the GPU that they ask for must be there."""

    def build_translator(opt: Namespace, *args: Any, **kwargs: Any) -> Any:
        check_gpu(opt)
        translator = original(opt, *args, **kwargs)
        check_attention(opt, translator.model)
        check_reports(opt, translator.model.decoder)
        length_control.prepare_translator(translator, opt)
        return translator

    return build_translator


def _asking_desired_lengths(original: Any) -> Any:
    """Ask for the lengths of a batch before it is translated."""

    def translate_batch(self: Any, batch: dict[str, Any], attn_debug: bool) -> Any:
        length_control.ask_desired_lengths(self, batch)
        return original(self, batch, attn_debug)

    return translate_batch


def _asking_target_lengths(original: Any) -> Any:
    """Ask for the lengths of the targets before a batch is trained."""

    def forward(self: Any, src: Tensor, tgt: Tensor, *args: Any, **kwargs: Any) -> Any:
        length_control.ask_target_lengths(self, tgt)
        return original(self, src, tgt, *args, **kwargs)

    return forward


def _positions_of(decoder: Any) -> LengthControlledPositions | None:
    """Return the positions of a decoder that know the length, where it has such."""
    positions = getattr(decoder.embeddings.make_embedding, "pe", None)
    return positions if isinstance(positions, LengthControlledPositions) else None


def _starting_with_lengths(original: Any) -> Any:
    """Start a decoding with the lengths that the batch asked for."""

    def init_state(self: Any, src: Any, enc_out: Any, enc_final_hs: Any) -> None:
        original(self, src, enc_out, enc_final_hs)
        positions = _positions_of(self)
        if positions is not None:
            positions.start(len(src))

    return init_state


def _with_lengths_following(original: Any) -> Any:
    """Repeat, reorder and drop lengths as the other rows of a decoder's state."""

    def map_state(self: Any, change: Any) -> None:
        original(self, change)
        positions = _positions_of(self)
        if positions is not None:
            positions.follow(change)

    return map_state
