"""The only module that replaces anything inside ``onmt``: `SEAMS` lists what, by which patch, and why."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

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
from onmt.modules.embeddings import Embeddings, PositionalEncoding
from onmt.trainer import Trainer
from onmt.transforms import TransformPipe
from onmt.transforms.clean import CleanTransform
from onmt.transforms.terminology import TerminologyTransform
from onmt.transforms.tokenize import BPETransform, ONMTTokenizerTransform, SentencePieceTransform
from onmt.translate import TranslationBuilder, translation_server, translator
from onmt.translate.beam_search import BeamSearchBase
from onmt.translate.decode_strategy import DecodeStrategy
from onmt.translate.greedy_search import GreedySearch
from onmt.translate.penalties import PenaltyBuilder
from onmt.utils import logging as logging_of_upstream
from onmt.utils import loss as upstream_loss
from onmt.utils import misc
from onmt.utils.earlystopping import EarlyStopping
from onmt.utils.loss import LossCompute

from nmt.checkpoint.files import allow_checkpoint_types
from nmt.data.batches import Batches, CleanCorpus
from nmt.data.loading import QuietLoader
from nmt.data.vocabulary import read_vocabulary
from nmt.patches import (
    building,
    checkpoints,
    lengths,
    logs,
    loss,
    options,
    processes,
    search,
    steps,
    stopping,
    text,
    translation,
)
from nmt.patches.seam import Seam, around, instead


def run_training_process(opt: Namespace, device_id: int, run: dict[str, Any] | None = None) -> None:
    """Train in this process; spawned ranks start without seams.

    A group of processes is left at the end: what torch tears down as the interpreter ends may abort a process
    whose peers have gone already.
    """
    install()
    from nmt.train import training

    training.run(opt, device_id, run)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# In the order in which they are put in place: of several for one attribute, the last is the outermost.
SEAMS = (
    Seam(
        onmt.opts,
        "model_opts",
        around(options.with_embedding_options),
        "embeddings of all sides, embedding_distillation, decoder_positions",
    ),
    Seam(onmt.opts, "_add_train_general_opts", around(options.with_training_options), "autocast, resume"),
    Seam(
        onmt.opts,
        "translate_opts",
        around(options.with_length_options),
        "desired_length, desired_lengths",
        is_imported=True,
    ),
    Seam(
        onmt.opts,
        "translate_opts",
        around(options.with_transforms_of_checkpoint),
        "transforms are those of the checkpoint, or none",
        is_imported=True,
    ),
    Seam(
        onmt.model_builder,
        "build_base_model",
        around(building.with_shared_embeddings),
        "shared embeddings, tied as modules",
    ),
    Seam(
        onmt.model_builder,
        "build_base_model",
        around(building.with_length_control),
        "positions that know the length of the output",
    ),
    Seam(
        onmt.model_builder,
        "build_base_model",
        around(building.with_quick_dropout),
        "masks that a CPU draws quickly",
    ),
    Seam(
        onmt.model_builder,
        "build_model",
        around(building.with_own_initialisation),
        "shared embeddings initialise themselves, last",
        is_imported=True,
    ),
    Seam(
        PositionalEncoding,
        "forward",
        around(building.with_growing_table),
        "sentences longer than its table get a longer one",
    ),
    Seam(
        BaseModel,
        "load_state_dict",
        around(checkpoints.loading_ties_once),
        "tied tensors are stored once, position tables not at all; copy generators are found",
    ),
    Seam(
        BaseModel,
        "load_safe_state_dict",
        around(checkpoints.loading_safetensors),
        "likewise; upstream finds files in shards only",
    ),
    Seam(
        model_saver,
        "load_checkpoint",
        around(checkpoints.reading_safely),
        "reads without running code; one clear line for a bad file",
        is_imported=True,
    ),
    Seam(
        Embeddings,
        "load_pretrained_vectors",
        around(checkpoints.reading_vectors_safely),
        "likewise",
    ),
    Seam(
        onmt.model_builder,
        "load_test_model",
        around(checkpoints.fitting_its_options),
        "one clear line for a checkpoint that does not fit its own options",
        is_imported=True,
    ),
    Seam(
        model_saver.ModelSaver,
        "_save",
        around(checkpoints.saving_atomically),
        "written all at once; keeps the position in the data",
    ),
    Seam(model_saver.ModelSaver, "_st_save", around(checkpoints.saving_atomically), "likewise"),
    Seam(
        LossCompute,
        "forward",
        around(loss.with_chunked_loss),
        "cross entropy without the N x V scores",
    ),
    Seam(
        onmt.bin.train,
        "single_main",
        instead(run_training_process),
        "exact resumption, and a report of what is tied",
    ),
    Seam(
        logging_of_upstream,
        "init_logger",
        around(logs.with_failing_log),
        "a log that cannot be written ends the command",
        is_imported=True,
    ),
    Seam(
        onmt.bin.build_vocab,
        "init_pool",
        around(processes.leaving_signals_to_parent),
        "processes that count words report no signals",
    ),
    Seam(
        onmt.bin.build_vocab,
        "write_files_from_queues",
        around(processes.leaving_signals_to_parent),
        "likewise",
    ),
    Seam(
        dynamic_iterator,
        "DynamicDatasetIter",
        instead(Batches),
        "the workers of a data loader import this package before upstream",
    ),
    Seam(
        text_corpus,
        "ParallelCorpus",
        instead(CleanCorpus),
        "white space of every kind, empty lines, bad UTF-8",
    ),
    Seam(
        text_utils,
        "parse_features",
        around(text.only_with_features),
        "text without features may hold the mark in front of them",
        is_imported=True,
    ),
    Seam(inputter, "_read_vocab_file", instead(read_vocabulary), "errors that name the file and the line"),
    Seam(
        CleanTransform,
        "warm_up",
        around(text.with_clear_needs),
        "says what is missing where there is no fasttext or no network",
    ),
    Seam(
        ONMTTokenizerTransform,
        "_validate_options",
        text.reading_literals,
        "options of pyonmttok are literals; upstream evaluates them",
    ),
    *(
        Seam(
            transform,
            "warm_up",
            around(text.with_readable_subwords),
            "says which files cannot be read; a library below ends the process",
        )
        for transform in (BPETransform, SentencePieceTransform, ONMTTokenizerTransform)
    ),
    Seam(
        TerminologyTransform,
        "warm_up",
        around(text.with_installed_languages),
        "models of spaCy are installed ones; upstream imports any package",
    ),
    Seam(
        TransformPipe, "apply_reverse", around(text.undoing_last_first), "the last transform is undone first"
    ),
    Seam(
        TransformPipe,
        "batch_apply",
        around(text.keeping_every_line),
        "lines that the transforms empty keep their places",
    ),
    Seam(
        misc,
        "use_gpu",
        around(processes.only_with_cuda),
        "several processes on a CPU over gloo",
        is_imported=True,
    ),
    Seam(onmt.train_single, "configure_process", around(processes.configuring_any_device), "likewise"),
    Seam(
        dynamic_iterator,
        "build_dynamic_dataset_iter",
        around(processes.with_batches_on_device),
        "likewise: batches stay on the CPU",
        is_imported=True,
    ),
    Seam(
        onmt.utils.distributed,
        "all_gather_list",
        around(processes.gathering_on_any_device),
        "likewise: upstream's works on a GPU only",
        is_imported=True,
    ),
    Seam(
        onmt.utils.distributed,
        "all_reduce_and_rescale_tensors",
        around(processes.summing_gradients),
        "gradients of several processes count in full",
    ),
    Seam(
        EarlyStopping,
        "has_stopped",
        around(stopping.leaving_the_end_to_all),
        "of several processes, none stops alone",
    ),
    Seam(
        Trainer,
        "_accum_batches",
        around(stopping.ending_together),
        "likewise; a signal ends training after a whole step",
    ),
    Seam(
        Trainer,
        "validate",
        around(stopping.with_validation_cut_short),
        "a signal does not wait for a validation",
    ),
    Seam(
        dynamic_iterator,
        "DataLoader",
        instead(QuietLoader),
        "signals to all processes leave the loader's workers alone",
    ),
    Seam(
        Trainer,
        "_maybe_update_dropout",
        around(steps.with_updates_reported),
        "dropout inside of an embedding ends when it is due",
    ),
    Seam(
        TranslationBuilder,
        "from_batch",
        around(translation.with_written_scores),
        "scores of beam search can be written, too",
    ),
    Seam(
        translator,
        "build_translator",
        around(translation.with_checked_options),
        "lengths are checked against the model; the GPU is there, and so is what is to be reported",
        is_imported=True,
    ),
    Seam(
        onmt.inference_engine.InferenceEnginePY,
        "_translate",
        around(search.with_copied_words),
        "models with copy attention translate",
    ),
    Seam(
        translation_server,
        "textbatch_to_tensor",
        around(search.with_copied_words_of_requests),
        "likewise, of a server",
    ),
    Seam(
        CopyGenerator,
        "forward",
        around(search.copying_by_sentence),
        "copy attention takes the rows of a batch sentence by sentence",
    ),
    Seam(upstream_loss, "collapse_copy_scores", around(search.collapsing_by_sentence), "likewise"),
    Seam(LossCompute, "_unbottle", around(search.with_sentences_first), "likewise"),
    Seam(
        LossCompute,
        "_compute_coverage_loss",
        around(search.covering_by_sentence),
        "likewise; lambda_coverage counts",
    ),
    Seam(
        InputFeedRNNDecoder,
        "forward",
        around(search.attending_by_sentence),
        "attention has the sentences first, as in all other decoders",
    ),
    Seam(
        translator.Translator,
        "_translate_batch_with_strategy",
        around(search.knowing_the_search),
        "sentences that are left in a search keep their own words",
    ),
    Seam(translator.Translator, "_decode_and_generate", around(search.copying_in_search), "likewise"),
    Seam(
        BeamSearchBase,
        "beams_non_finished",
        around(search.with_length_of_sentence),
        "how long sources are follows the sentences that are left",
    ),
    Seam(
        BeamSearchBase,
        "update_finished",
        around(search.forbidding_in_beams),
        "likewise what is forbidden",
    ),
    Seam(
        GreedySearch,
        "update_finished",
        around(search.forbidding_in_greedy_search),
        "likewise",
    ),
    Seam(GreedySearch, "advance", around(search.remembering_what_was_said), "block_ngram_repeat works"),
    Seam(
        DecodeStrategy,
        "block_ngram_repeats",
        around(search.forbidding_single_words),
        "likewise for single words",
    ),
    Seam(
        PenaltyBuilder,
        "coverage_wu",
        around(search.covering_words),
        "coverage is that of words, not of padding",
    ),
    Seam(
        translator.Translator,
        "translate_batch",
        around(lengths.asking_desired_lengths),
        "each batch asks for its own lengths",
    ),
    Seam(NMTModel, "forward", around(lengths.asking_target_lengths), "in training, those of its targets"),
    Seam(
        TransformerDecoderBase,
        "init_state",
        around(lengths.starting_with_lengths),
        "lengths follow the rows of the decoder's state",
    ),
    Seam(TransformerDecoderBase, "map_state", around(lengths.with_lengths_following), "likewise"),
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
        seam.put_in_place()


def autocast_model(model: Any, losses: Any, device: torch.device) -> None:
    """Run a model and its losses under bfloat16 autocast, each call in a context of its own.

    One context around the whole training would keep the weights of its first step: autocast caches them.
    """
    for module in (model, *losses):
        module.forward = torch.autocast(device.type, torch.bfloat16)(module.forward)
