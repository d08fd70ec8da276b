"""The patched attributes of OpenNMT-py, with the reason for each, and how a patch is applied."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

# Modules that import a patched function by name must be imported before the patches are applied.
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
import onmt.utils.logging
import onmt.utils.loss
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
from onmt.utils import misc
from onmt.utils.earlystopping import EarlyStopping
from onmt.utils.loss import LossCompute

from nmt.checkpoint.files import allow_checkpoint_types
from nmt.data.batches import Batches, QuietLoader
from nmt.data.corpora import CleanCorpus
from nmt.data.vocabulary import read_vocabulary
from nmt.patches import building, checkpoints, copying, search, text, training


class Wrap(NamedTuple):
    """Wrap a function of OpenNMT-py.

    Attributes:
        owner: module or class that has the function.
        name: its name there.
        wrapper: called with the original function, returns the new one.
    """

    owner: Any
    name: str
    wrapper: Callable[[Any], Any]

    def apply(self) -> None:
        """Apply the patch."""
        original = getattr(self.owner, self.name)
        _replace(self.owner, self.name, functools.wraps(original)(self.wrapper(original)))


class Replace(NamedTuple):
    """Replace a function or class of OpenNMT-py.

    Attributes:
        owner: module or class that has it.
        name: its name there.
        new: what takes its place.
    """

    owner: Any
    name: str
    new: Any

    def apply(self) -> None:
        """Apply the patch."""
        _replace(self.owner, self.name, self.new)


def _replace(owner: Any, name: str, new: Any) -> None:
    """Replace an attribute, for a module also in the modules of OpenNMT-py that have imported it by name."""
    original = getattr(owner, name)
    setattr(owner, name, new)
    if isinstance(owner, ModuleType):
        for place, module in list(sys.modules.items()):
            if place.startswith("onmt") and module.__dict__.get(name) is original:
                setattr(module, name, new)


# Reasons, and the patches that each needs. Patches of the same attribute nest: the last one is the outermost.
PATCHES: dict[str, tuple[Wrap | Replace, ...]] = {
    "adds options: embeddings, distillation, autocast, resume, lengths; transforms default to the model's": (
        Wrap(onmt.opts, "model_opts", building.with_embedding_options),
        Wrap(onmt.opts, "_add_train_general_opts", building.with_training_options),
        Wrap(onmt.opts, "translate_opts", building.with_length_options),
        Wrap(onmt.opts, "translate_opts", building.with_transforms_of_checkpoint),
    ),
    "builds models with shared embeddings, length control, fast dropout and positions without limit": (
        Wrap(onmt.model_builder, "build_base_model", building.with_shared_embeddings),
        Wrap(onmt.model_builder, "build_base_model", building.with_length_control),
        Wrap(onmt.model_builder, "build_base_model", building.with_fast_dropout),
        Wrap(onmt.model_builder, "build_model", building.with_embedding_initialization),
        Wrap(PositionalEncoding, "forward", building.with_growing_table),
    ),
    "stores tied tensors once; reads without running code; writes atomically; supports exact resumption": (
        Wrap(BaseModel, "load_state_dict", checkpoints.with_unique_tensors),
        Replace(BaseModel, "load_safe_state_dict", checkpoints.load_safe_state_dict),
        Wrap(model_saver, "load_checkpoint", checkpoints.with_verification),
        Wrap(Embeddings, "load_pretrained_vectors", checkpoints.with_safe_vectors),
        Wrap(onmt.model_builder, "load_test_model", checkpoints.with_model_errors),
        Wrap(model_saver.ModelSaver, "_save", checkpoints.with_atomic_saving),
        Wrap(model_saver.ModelSaver, "_st_save", checkpoints.with_atomic_saving),
    ),
    "computes the cross entropy without the N x V scores": (
        Wrap(LossCompute, "forward", training.with_chunked_loss),
    ),
    "fails when the log file cannot be written": (
        Wrap(onmt.utils.logging, "init_logger", training.with_failing_log),
    ),
    "handles whitespace, empty lines, bad UTF-8 and the feature mark; names file and line in errors": (
        Replace(text_corpus, "ParallelCorpus", CleanCorpus),
        Replace(inputter, "_read_vocab_file", read_vocabulary),
        Wrap(text_utils, "parse_features", text.with_optional_features),
        Wrap(TransformPipe, "apply_reverse", text.in_reverse_order),
        Wrap(TransformPipe, "batch_apply", text.with_empty_lines),
    ),
    "names what transforms lack; runs no code from their options and loads installed spaCy models only": (
        Wrap(CleanTransform, "warm_up", text.with_fasttext_errors),
        Replace(ONMTTokenizerTransform, "_validate_options", classmethod(text.validate_tokenizer_options)),
        Wrap(BPETransform, "warm_up", text.with_subword_errors),
        Wrap(SentencePieceTransform, "warm_up", text.with_subword_errors),
        Wrap(ONMTTokenizerTransform, "warm_up", text.with_subword_errors),
        Wrap(TerminologyTransform, "warm_up", text.with_installed_spacy_models),
    ),
    "applies the patches in data loader workers, too": (
        Replace(dynamic_iterator, "DynamicDatasetIter", Batches),
    ),
    "trains several processes on CPUs over gloo; sums their gradients without a second division": (
        Wrap(misc, "use_gpu", training.with_cpu_ranks),
        Wrap(onmt.train_single, "configure_process", training.on_any_device),
        Wrap(dynamic_iterator, "build_dynamic_dataset_iter", training.with_batches_on_device),
        Replace(onmt.utils.distributed, "all_gather_list", training.all_gather_list),
        Wrap(onmt.utils.distributed, "all_reduce_and_rescale_tensors", training.without_rescaling),
    ),
    "stops all ranks after the same step, and at signals after a whole step": (
        Wrap(EarlyStopping, "has_stopped", training.with_stop_of_all_ranks),
        Wrap(Trainer, "_accum_batches", training.with_same_last_step),
        Wrap(Trainer, "validate", training.with_interruptible_validation),
        Replace(dynamic_iterator, "DataLoader", QuietLoader),
        Wrap(onmt.bin.build_vocab, "init_pool", training.with_signals_ignored),
        Wrap(onmt.bin.build_vocab, "write_files_from_queues", training.with_signals_ignored),
    ),
    "ends dropout inside embeddings on schedule": (
        Wrap(Trainer, "_maybe_update_dropout", training.with_update_counts),
    ),
    "checks options against the model; writes the scores of beam search": (
        Wrap(translator, "build_translator", search.with_checked_options),
        Wrap(TranslationBuilder, "from_batch", search.with_written_scores),
    ),
    "makes copy attention and its coverage loss work: batches are ordered sentence by sentence": (
        Wrap(onmt.inference_engine.InferenceEnginePY, "_translate", copying.with_copy_inputs),
        Wrap(translation_server, "textbatch_to_tensor", copying.with_copy_inputs_of_requests),
        Replace(CopyGenerator, "forward", copying.mixed_probabilities),
        Replace(onmt.utils.loss, "collapse_copy_scores", copying.collapse_copy_scores),
        Replace(LossCompute, "_unbottle", copying.unbottle),
        Replace(LossCompute, "_compute_coverage_loss", copying.weighted_coverage_loss),
        Wrap(InputFeedRNNDecoder, "forward", copying.with_sentences_first),
        Wrap(translator.Translator, "_translate_batch_with_strategy", copying.with_search_state),
        Wrap(translator.Translator, "_decode_and_generate", copying.with_copied_words),
    ),
    "fixes beam and greedy search: length limits, n-gram blocking and coverage penalty per sentence": (
        Wrap(BeamSearchBase, "beams_non_finished", search.with_length_per_sentence),
        Wrap(BeamSearchBase, "update_finished", search.with_blocking_per_beam),
        Wrap(GreedySearch, "update_finished", search.with_blocking_per_sentence),
        Wrap(GreedySearch, "advance", search.with_blocked_ngrams),
        Wrap(DecodeStrategy, "block_ngram_repeats", search.with_blocked_words),
        Wrap(PenaltyBuilder, "coverage_wu", search.without_padding),
    ),
    "passes desired lengths to the decoder": (
        Wrap(translator.Translator, "translate_batch", search.with_desired_lengths),
        Wrap(NMTModel, "forward", search.with_target_lengths),
        Wrap(TransformerDecoderBase, "init_state", search.with_initial_lengths),
        Wrap(TransformerDecoderBase, "map_state", search.with_mapped_lengths),
    ),
}


@functools.cache
def apply_patches() -> None:
    """Apply all patches; later calls do nothing."""
    allow_checkpoint_types()
    for patches in PATCHES.values():
        for patch in patches:
            patch.apply()
