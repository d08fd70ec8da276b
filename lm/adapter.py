"""How `shared-embeddings` opens checkpoints of ``lm_train``: see `shared_embeddings.compress.host`.

In ONNX, a model has the inputs ``ids`` ``(B, T)`` and ``state.N``, and the outputs ``logits`` ``(B, T, V)``
and ``next_state.N``, the state for the next ids. An LSTM starts with zeros, Transformer-XL with memories of
length 0. A model with a table of n-grams cannot be exported whole.

Axes: ``B`` parallel texts, ``T`` tokens of each, ``V`` vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shared_embeddings as se
from lm.checkpoint import FORMAT, load_model, save_state
from lm.data.corpus import EOS, word_blocks
from lm.data.corpus import Vocabulary as Words
from lm.evaluation import Reading, evaluate, read_data
from lm.models import LanguageModel, State
from lm.models.awd_lstm import AWDLSTM, LSTMLayer
from shared_embeddings.checkpoints import contains_strings
from shared_embeddings.compress.host import (
    BANDS_NOTE,
    TRAINING_STATE_NOTE,
    EmbeddingTable,
    HostVocabulary,
    TrimmableTrainedModel,
    check_scores,
    copy_output_bias,
    teacher_table,
    with_untrained_part,
)
from shared_embeddings.compress.measure import (
    GENERATED,
    LINES,
    Batch,
    Quality,
    Samples,
    Validation,
    names_of,
    sampled_lines,
)
from shared_embeddings.embedding import WordEmbedding
from shared_embeddings.export.onnx import Example, OnnxBody, StandIn, quiet
from shared_embeddings.nn.layers import evaluating
from shared_embeddings.quant.packed_tensor import unfreeze
from shared_embeddings.registry import get_method_config
from shared_embeddings.utils.errors import UserError, first_line, require

NAME, NGRAMS = "words", "ngrams"
_TEXTS = 20  # texts that are read at a time
_LONG = 50  # tokens of each text that are read at a time with gradients
# For ONNX: words of an example; sizes with which a model is traced, no two of them the same.
_EXAMPLE, _BATCH, _PAST, _NEW = 12, 2, 5, 3
_OPSET = 20


class LanguageModelAdapter:
    """Opens the checkpoints of ``lm_train``."""

    def sniff(self, path: Path) -> bool:
        return contains_strings(path, FORMAT)

    def read(self, path: Path, runs: bool = True) -> TrainedLanguageModel:
        return TrainedLanguageModel(path)

    read_trimmable = read


class TrainedLanguageModel(TrimmableTrainedModel):
    """A language model read from a checkpoint, on the CPU."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.module: LanguageModel
        self.module, self.words, self.config, _, self.packing = load_model(path)
        # Any number of embeddings may be placed instead of it, one after another.
        self.trained = self.module.embedding
        self.ngrams = self.module.ngrams
        self.original = self.trimmed = Words(self.words)

    def embeddings(self) -> list[WordEmbedding]:
        embedding = self.module.embedding
        return [WordEmbedding(NAME, self.words, embedding.padding_idx, embedding)]

    def tables(self) -> list[EmbeddingTable]:
        """The table of words unless there are n-grams and it cannot be replaced, and that of n-grams."""
        if self.ngrams is None:
            return [self._word_table()]
        embedding = self.ngrams.embedding
        counts = embedding.counts()
        ngrams = EmbeddingTable(
            name=NGRAMS,
            uses=("input",),
            words=(),
            table=teacher_table(embedding, is_scored=False),
            padding_idx=None,
            is_scored=False,
            sentence_marks=(),
            parameters=counts["total"],
            stored_bits=counts["stored_bits"],
        )
        with contextlib.suppress(UserError):
            return [self._word_table(), ngrams]
        return [ngrams]

    def _word_table(self) -> EmbeddingTable:
        embedding = self.trained.inner_embedding()
        try:
            table = teacher_table(embedding, is_scored=True)
        except UserError as error:
            raise UserError(f"model {self.path}: {error}") from error
        counts = embedding.counts()
        return EmbeddingTable(
            name=NAME,
            uses=("input", "output"),
            words=self.words,
            table=table,
            padding_idx=embedding.padding_idx,
            is_scored=True,
            is_by_frequency=True,
            has_output_bias=embedding.output_bias() is not None,
            sentence_marks=(EOS,),
            parameters=counts["total"],
            stored_bits=counts["stored_bits"],
            part=None if embedding is self.trained else f"map of {self.trained.method}",
        )

    def options_for(self, table: str, method: str, options: Mapping[str, object]) -> dict[str, object]:
        old = self.trained
        chosen: dict[str, Any] = dict(options)
        if table == NGRAMS:
            if "output" in get_method_config(method).__dataclass_fields__:
                chosen.setdefault("output", "none")
            return chosen
        if old.inner_embedding().output_bias() is not None and chosen.get("output") != "none":
            chosen.setdefault("output_bias", True)
        check_scores(with_untrained_part(old, self.words, method, chosen), old.score_dim)
        return chosen

    def quality(self, validation: Validation) -> Quality:
        """The perplexity of a text, as ``lm_evaluate`` computes it by default."""
        path, reading = validation.one_text(), Reading()
        text = read_data(path, "valid" if path.is_dir() else None, self.words)
        score = evaluate(self.module, text.tokens, reading)
        how = f"{score.tokens:,} targets, {text.unknown:,} <unk>, segments of {reading.target_length} tokens"
        return Quality("perplexity", score.perplexity, f"{text.name}: {how}")

    def samples(self, texts: Sequence[Path] | None, seed: int, tokens: int) -> Samples:
        ids, how = self._read(texts, seed, tokens)

        def predict(ids: Tensor) -> Batch:
            # What follows the last word is the first one of the next part.
            has_targets = texts is not None and ids.size(1) > 1
            read = ids[:, :-1] if has_targets else ids
            hidden = self.module(read, self.module.initial_state(len(read))).hidden.flatten(0, 1)
            targets = ids[:, 1:].flatten() if has_targets else None
            return Batch(self.module.embedding.log_prob(hidden), hidden, targets)

        starts = range(0, max(1, ids.size(1) - 1), _LONG)
        parts = [ids[:, first : first + _LONG + 1] for first in starts]
        lookups: dict[str, dict[nn.Module, float]] = {NAME: {self.module.embedding: 1.0}}
        if self.ngrams is not None:
            lookups[NGRAMS] = {self.ngrams.embedding: 1.0}
        return Samples(
            how, parts, predict, words=ids.unique(), running=lambda: evaluating(self.module), lookups=lookups
        )

    def _read(self, texts: Sequence[Path] | None, seed: int, tokens: int) -> tuple[Tensor, str]:
        """The ids ``(B, T)`` of texts, or of about so many sampled tokens, and what they are."""
        if texts is not None:
            lines = map(self.original.encode, sampled_lines(texts, seed, max(LINES, tokens // 5)))
            flat = list(chain.from_iterable(lines))[:tokens]
            columns = min(_TEXTS, max(1, len(flat) // _LONG))
            ids = torch.tensor(flat[: len(flat) // columns * columns]).view(columns, -1)
            return ids, f"{ids.numel():,} tokens of {names_of(texts)}"
        model, draw = self.module, torch.Generator().manual_seed(seed)
        written = [torch.full((_TEXTS,), self.original.eos)]
        with evaluating(model), torch.no_grad():
            state = model.initial_state(_TEXTS)
            while len(written) < max(2, tokens // _TEXTS):
                output = model(written[-1][:, None], state)
                state = output.state
                probabilities = model.embedding.log_prob(output.hidden[:, -1]).float().exp()  # (B, V)
                if not probabilities.isfinite().all():
                    raise UserError(
                        "the model scores are not finite: training diverged; use another checkpoint"
                    )
                written.append(torch.multinomial(probabilities, 1, generator=draw)[:, 0])
        ids = torch.stack(written, dim=1)
        return ids, f"{ids.numel():,} tokens sampled from the model; pass a text for real ones"

    def count_rows(self, texts: Sequence[Path] | None, seed: int) -> dict[str, Tensor]:
        if self.ngrams is None:
            return {}
        parts: Iterable[Tensor]
        if texts is None:
            parts = [self._read(None, seed, GENERATED)[0]]
        else:
            blocks = (word_blocks(path) for path in texts)
            parts = (
                torch.tensor([[self.original.index.get(word, self.original.unk) for word in block]])
                for block in chain.from_iterable(blocks)
                if block
            )
        context, counts = None, torch.zeros(self.ngrams.embedding.num_embeddings, dtype=torch.long)
        for tokens in parts:
            context = self.ngrams.initial_context(len(tokens)) if context is None else context
            ids, context = self.ngrams.ids(tokens, context)
            counts += torch.bincount(ids.flatten(), minlength=len(counts))
        return {NGRAMS: counts}

    def onnx_body(self) -> OnnxBody:
        if self.ngrams is not None:
            raise UserError("a model with a table of n-grams cannot be traced; use --format onnx-embeddings")
        return traced(self.module, NAME, self.weight_bytes())

    def place(self, fitted: Mapping[str, se.SharedEmbedding]) -> list[str]:
        lost: list[str] = []
        if NAME in fitted:
            if (bias := self.trained.inner_embedding().output_bias()) is not None:
                lost = copy_output_bias(fitted[NAME], bias)
            self._put_in(self.trained.with_inner_embedding(fitted[NAME]))
        if self.ngrams is not None and NGRAMS in fitted:
            self.ngrams.embedding = embedding = fitted[NGRAMS]
            settings = {"method": embedding.method, **embedding.stored_options()}
            self.config = {**self.config, "ngram_embedding": settings}
        return [TRAINING_STATE_NOTE, *lost]

    def _put_in(self, embedding: se.SharedEmbedding) -> None:
        """Put an embedding of words into the model, and its settings into the configuration."""
        self.module.embedding = embedding
        settings = {"method": embedding.method, **embedding.stored_options()}
        self.config = {**self.config, "embedding": settings}

    def write(self, output: Path, tensors: Mapping[str, Tensor], card: str = "") -> None:
        save_state(output, tensors, self.words, self.config, None)

    def vocabularies(self) -> list[HostVocabulary]:
        words = self.original
        return [HostVocabulary(NAME, words.words, frozenset((words.unk, words.eos)), words.unk)]

    def encode(self, vocabulary: str, lines: Sequence[str], trimmed: bool = False) -> list[list[int]]:
        words = self.trimmed if trimmed else self.original
        return [words.encode(line) for line in lines]

    def trim(self, token_ids: Mapping[str, Tensor]) -> list[str]:
        """Remove all words except those ``(n,)``; in texts, the others become ``<unk>``."""
        if self.ngrams is not None:
            raise UserError(
                "the rows of n-grams are found by the ids of words, so that no word can be removed; compress "
                "this model instead"
            )
        old = self.module.embedding
        self._put_in(old.select_rows(token_ids[NAME]))
        self.words = [self.original.words[word] for word in token_ids[NAME].tolist()]
        self.trimmed = Words(self.words)
        remark = (
            "probabilities are normalized over the remaining words: a perplexity is lower than the whole "
        )
        notes = [TRAINING_STATE_NOTE, f"{remark}model's and cannot be compared with it"]
        return notes if old.has_linear_scores else [*notes, BANDS_NOTE]

    def restored(
        self, vocabulary: str, lines: Sequence[str], ids: Sequence[Sequence[int]], trimmed: bool = False
    ) -> int:
        unknown = (self.trimmed if trimmed else self.original).unk
        return sum(unknown not in line for line in ids)


class _Step(nn.Module):
    """A model that returns scores ``(B, T, V)`` and the next state."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        output = self.model(ids, state)
        return self.model.embedding.logits(output.hidden), output.state


class _OnnxLSTM(nn.Module):
    """Replaces an LSTM layer while a model is traced, by the operator LSTM of ONNX."""

    def __init__(self, layer: LSTMLayer) -> None:
        super().__init__()
        self.width = layer.hidden_size
        # The gates of torch are i, f, g, o; those of ONNX i, o, f, g.
        weights = (layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0)
        input_weights, recurrent, *biases = (
            part.unflatten(0, (4, -1))[[0, 3, 1, 2]].flatten(0, 1) for part in weights
        )
        self.input_weights, self.recurrent = input_weights[None], recurrent[None]
        self.biases = torch.cat(biases)[None]

    def forward(self, inputs: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states = (1, inputs.size(1), self.width)
        outputs, hidden, cell = torch.onnx.ops.symbolic_multi_out(
            "LSTM",
            [inputs, self.input_weights, self.recurrent, self.biases, None, hidden, cell],
            {"hidden_size": self.width},
            dtypes=(torch.float32,) * 3,
            shapes=((inputs.size(0), *states), states, states),
            version=_OPSET,
        )
        return outputs.squeeze(1), hidden, cell


@torch.no_grad()
def traced(model: LanguageModel, name: str, checkpoint_bytes: int) -> OnnxBody:
    """The graph of a model on the CPU with an embedding of this name; the model cannot be used afterwards."""
    require("onnxscript")
    embedding, step = model.embedding, _Step(model).eval()
    # What the model computes: for some texts, for another part of them, and for one token.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(embedding.num_embeddings, (3, 2 * _EXAMPLE), generator=generator)
    _, state = step(ids[:, :_EXAMPLE], start := model.initial_state(3))
    single = tuple(part[:, :1].contiguous() for part in state)
    next_ids = ids[:, _EXAMPLE:]
    parts = ((ids[:, :_EXAMPLE], start), (next_ids, state), (next_ids[:1, :1], single))
    examples = []
    for part_ids, before in parts:
        logits, after = step(part_ids, before)
        inputs = {f"state.{number}": part.numpy() for number, part in enumerate(before)}
        outputs = {f"next_state.{number}": part.numpy() for number, part in enumerate(after)}
        inputs["ids"], outputs["logits"] = part_ids.numpy(), logits.numpy()
        examples.append(Example(inputs, outputs))
    state = step(torch.zeros(_BATCH, _PAST, dtype=torch.long), model.initial_state(_BATCH))[1]
    tables = {}
    # The two steps of a softmax with classes are traced like the rest of the model.
    if not embedding.has_linear_scores:
        unfreeze(embedding)
    else:
        tables[name] = embedding
        model.embedding = StandIn(name, embedding)  # type: ignore[assignment]
    if isinstance(model, AWDLSTM):
        model.layers = nn.ModuleList(map(_OnnxLSTM, model.layers))  # type: ignore[arg-type]
    try:
        program = _exported(step, state)
    except Exception as error:  # each operator fails in its own way
        raise UserError(
            f"{model.kind}: cannot be traced ({first_line(error)}); use --format onnx-embeddings"
        ) from error
    return OnnxBody(program, tables, examples, checkpoint_bytes)


def _exported(step: _Step, state: State) -> Any:
    """The ``ModelProto`` of a model, for any batch, length, and length of the memory."""
    from lm.models.transformer_xl import TransformerXL  # slow to import

    any_size = torch.export.Dim.DYNAMIC
    ids = torch.zeros(_BATCH, _NEW, dtype=torch.long)
    is_memory = isinstance(step.model, TransformerXL)
    axes = {0: any_size, 1: any_size} if is_memory else {1: any_size}
    names = [f"state.{number}" for number in range(len(state))]
    with quiet():
        exported = torch.onnx.export(
            step,
            (ids, state),
            dynamo=True,
            opset_version=_OPSET,
            dynamic_shapes=({0: any_size, 1: any_size}, (axes,) * len(state)),
            input_names=["ids", *names],
            output_names=["logits", *(f"next_{name}" for name in names)],
            verbose=False,
        )
    assert exported is not None
    program = require("onnx_ir").to_proto(exported.model)
    for value in program.graph.input:
        first, second, *_ = value.type.tensor_type.shape.dim
        second.dim_param = "time" if value.name == "ids" else "batch"
        if value.name == "ids" or is_memory:
            first.dim_param = "batch" if value.name == "ids" else "memory"
    # Their axes follow from those of the inputs.
    for value in program.graph.output:
        value.type.tensor_type.ClearField("shape")
    return program
