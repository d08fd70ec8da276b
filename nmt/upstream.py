"""The only module that replaces anything inside ``onmt``: `SEAMS` says what, by what of `nmt.seams`, why."""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple

# Every module that imports a replaced function by name has to be there before the seams are put in place.
import onmt.bin.average_models
import onmt.bin.build_vocab
import onmt.bin.release_model
import onmt.bin.server
import onmt.bin.train
import onmt.bin.translate
import onmt.decoders.ensemble
import onmt.inference_engine
import onmt.inputters
import onmt.model_builder
import onmt.opts
import onmt.train_single
import onmt.utils.distributed
import torch
from onmt.decoders.decoder import InputFeedRNNDecoder
from onmt.decoders.transformer import TransformerDecoderBase
from onmt.inputters import dynamic_iterator, inputter, text_corpus, text_utils
from onmt.models import model_saver
from onmt.models.model import BaseModel, NMTModel
from onmt.modules.copy_generator import CopyGenerator
from onmt.modules.embeddings import PositionalEncoding
from onmt.trainer import Trainer
from onmt.transforms.clean import CleanTransform
from onmt.translate import TranslationBuilder, translation_server, translator
from onmt.translate.beam_search import BeamSearchBase
from onmt.translate.decode_strategy import DecodeStrategy
from onmt.translate.greedy_search import GreedySearch
from onmt.translate.penalties import PenaltyBuilder
from onmt.utils import loss as upstream_loss
from onmt.utils import misc
from onmt.utils.earlystopping import EarlyStopping
from onmt.utils.loss import LossCompute

from nmt.data import Batches, CleanCorpus
from nmt.files import allow_checkpoint_types
from nmt.seams import building, checkpoints, lengths, loss, options, processes, search, text, translation
from nmt.vocabulary import read_vocabulary


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


def _around(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Put in place what ``make`` returns for the original; it goes by the name of the original."""
    return lambda original: functools.wraps(original)(make(original))


def _instead(new: Any) -> Callable[[Any], Any]:
    """Put ``new`` in place."""
    return lambda original: new


class Seam(NamedTuple):
    """One attribute of OpenNMT that is replaced.

    Attributes:
        owner: the module or class that has it.
        name: of the attribute.
        how: returns for the original what goes there.
        why: in a few words.
        is_imported: also replaced in the modules that have imported it by name.
    """

    owner: Any
    name: str
    how: Callable[[Any], Any]
    why: str
    is_imported: bool = False


# In the order in which they are put in place: of several for one attribute, the last is the outermost.
SEAMS = (
    Seam(
        onmt.opts,
        "model_opts",
        _around(options.with_embedding_options),
        "embeddings of all sides, embedding_distillation, decoder_positions",
    ),
    Seam(onmt.opts, "_add_train_general_opts", _around(options.with_autocast_option), "autocast"),
    Seam(
        onmt.opts,
        "translate_opts",
        _around(options.with_length_options),
        "desired_length, desired_lengths",
        is_imported=True,
    ),
    Seam(
        onmt.model_builder,
        "build_base_model",
        _around(building.with_shared_embeddings),
        "shared embeddings, tied as modules",
    ),
    Seam(
        onmt.model_builder,
        "build_base_model",
        _around(building.with_length_control),
        "positions that know the length of the output",
    ),
    Seam(
        onmt.model_builder,
        "build_base_model",
        _around(building.with_quick_dropout),
        "masks that a CPU draws quickly",
    ),
    Seam(
        onmt.model_builder,
        "build_model",
        _around(building.with_own_initialisation),
        "shared embeddings initialise themselves, last",
        is_imported=True,
    ),
    Seam(
        PositionalEncoding,
        "forward",
        _around(building.with_growing_table),
        "sentences longer than its table get a longer one",
    ),
    Seam(
        BaseModel,
        "load_state_dict",
        _around(checkpoints.loading_ties_once),
        "tied tensors are stored once, position tables not at all; copy generators are found",
    ),
    Seam(
        BaseModel,
        "load_safe_state_dict",
        _around(checkpoints.loading_safetensors),
        "likewise; upstream finds files in shards only",
    ),
    Seam(
        model_saver,
        "load_checkpoint",
        _around(checkpoints.reading_safely),
        "reads without running code; one clear line for a bad file",
        is_imported=True,
    ),
    Seam(
        model_saver.ModelSaver,
        "_save",
        _around(checkpoints.saving_atomically),
        "written all at once; keeps the position in the data",
    ),
    Seam(model_saver.ModelSaver, "_st_save", _around(checkpoints.saving_atomically), "likewise"),
    Seam(
        LossCompute,
        "forward",
        _around(loss.with_chunked_loss),
        "cross entropy without the N x V scores",
    ),
    Seam(
        onmt.bin.train,
        "single_main",
        _instead(run_training_process),
        "exact resumption, and a report of what is tied",
    ),
    Seam(
        onmt.bin.train,
        "spawned_train",
        _instead(spawned_training),
        "spawned processes import this package before upstream",
    ),
    Seam(
        dynamic_iterator,
        "DynamicDatasetIter",
        _instead(Batches),
        "the workers of a data loader import this package before upstream",
    ),
    Seam(
        text_corpus,
        "ParallelCorpus",
        _instead(CleanCorpus),
        "white space of every kind, empty lines, bad UTF-8",
    ),
    Seam(
        text_utils,
        "parse_features",
        _around(text.only_with_features),
        "text without features may hold the mark in front of them",
        is_imported=True,
    ),
    Seam(inputter, "_read_vocab_file", _instead(read_vocabulary), "errors that name the file and the line"),
    Seam(
        CleanTransform,
        "warm_up",
        _around(text.with_clear_needs),
        "says what is missing where there is no fasttext or no network",
    ),
    Seam(
        misc,
        "use_gpu",
        _around(processes.only_with_cuda),
        "several processes on a CPU over gloo",
        is_imported=True,
    ),
    Seam(onmt.train_single, "configure_process", _around(processes.configuring_any_device), "likewise"),
    Seam(
        dynamic_iterator,
        "build_dynamic_dataset_iter",
        _around(processes.with_batches_on_device),
        "likewise: batches stay on the CPU",
        is_imported=True,
    ),
    Seam(
        onmt.utils.distributed,
        "all_gather_list",
        _around(processes.gathering_on_any_device),
        "likewise: upstream's works on a GPU only",
        is_imported=True,
    ),
    Seam(
        onmt.utils.distributed,
        "all_reduce_and_rescale_tensors",
        _around(processes.summing_gradients),
        "gradients of several processes count in full",
    ),
    Seam(
        EarlyStopping,
        "has_stopped",
        _around(processes.leaving_the_end_to_all),
        "of several processes, none stops alone",
    ),
    Seam(Trainer, "_accum_batches", _around(processes.ending_together), "likewise"),
    Seam(
        TranslationBuilder,
        "from_batch",
        _around(translation.with_written_scores),
        "scores of beam search can be written, too",
    ),
    Seam(
        translator,
        "build_translator",
        _around(translation.with_checked_options),
        "lengths are checked against the model; the GPU is there, and so is what is to be reported",
        is_imported=True,
    ),
    Seam(
        onmt.inference_engine.InferenceEnginePY,
        "_translate",
        _around(search.with_copied_words),
        "models with copy attention translate",
    ),
    Seam(
        translation_server,
        "textbatch_to_tensor",
        _around(search.with_copied_words_of_requests),
        "likewise, of a server",
    ),
    Seam(
        CopyGenerator,
        "forward",
        _around(search.copying_by_sentence),
        "copy attention takes the rows of a batch sentence by sentence",
    ),
    Seam(upstream_loss, "collapse_copy_scores", _around(search.collapsing_by_sentence), "likewise"),
    Seam(LossCompute, "_unbottle", _around(search.with_sentences_first), "likewise"),
    Seam(
        LossCompute,
        "_compute_coverage_loss",
        _around(search.covering_by_sentence),
        "likewise; lambda_coverage counts",
    ),
    Seam(
        InputFeedRNNDecoder,
        "forward",
        _around(search.attending_by_sentence),
        "attention has the sentences first, as in all other decoders",
    ),
    Seam(
        translator.Translator,
        "_translate_batch_with_strategy",
        _around(search.knowing_the_search),
        "sentences that are left in a search keep their own words",
    ),
    Seam(translator.Translator, "_decode_and_generate", _around(search.copying_in_search), "likewise"),
    Seam(
        BeamSearchBase,
        "beams_non_finished",
        _around(search.with_length_of_sentence),
        "how long sources are follows the sentences that are left",
    ),
    Seam(
        BeamSearchBase,
        "update_finished",
        _around(search.forbidding_in_beams),
        "likewise what is forbidden",
    ),
    Seam(
        GreedySearch,
        "update_finished",
        _around(search.forbidding_in_greedy_search),
        "likewise",
    ),
    Seam(GreedySearch, "advance", _around(search.remembering_what_was_said), "block_ngram_repeat works"),
    Seam(
        DecodeStrategy,
        "block_ngram_repeats",
        _around(search.forbidding_single_words),
        "likewise for single words",
    ),
    Seam(
        PenaltyBuilder,
        "coverage_wu",
        _around(search.covering_words),
        "coverage is that of words, not of padding",
    ),
    Seam(
        translator.Translator,
        "translate_batch",
        _around(lengths.asking_desired_lengths),
        "each batch asks for its own lengths",
    ),
    Seam(NMTModel, "forward", _around(lengths.asking_target_lengths), "in training, those of its targets"),
    Seam(
        TransformerDecoderBase,
        "init_state",
        _around(lengths.starting_with_lengths),
        "lengths follow the rows of the decoder's state",
    ),
    Seam(TransformerDecoderBase, "map_state", _around(lengths.with_lengths_following), "likewise"),
)

_installed = False


def install() -> None:
    """Put all seams in place; a second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    allow_checkpoint_types()
    for seam in SEAMS:
        original = getattr(seam.owner, seam.name)
        new = seam.how(original)
        setattr(seam.owner, seam.name, new)
        if seam.is_imported:
            for module in _importing(seam.name, original):
                setattr(module, seam.name, new)


def _importing(name: str, original: Any) -> list[Any]:
    """Return the loaded modules of OpenNMT that have ``original`` under its name."""
    return [
        module
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("onmt") and module.__dict__.get(name) is original
    ]


def autocast_model(model: Any, losses: Any, device: torch.device) -> None:
    """Run a model and its losses under bfloat16 autocast, each call in a context of its own.

    One context around the whole training would keep the weights of its first step: autocast caches them.
    """
    for module in (model, *losses):
        module.forward = torch.autocast(device.type, torch.bfloat16)(module.forward)
