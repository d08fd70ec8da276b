"""The command ``lm_generate``: generates text with a trained model."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lm.checkpoint import load_model
from lm.cli import chosen_device
from lm.data.corpus import EOS, Vocabulary
from lm.models import LanguageModel
from shared_embeddings.nn.layers import evaluating
from shared_embeddings.utils.command_line import Parser, positive
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.paths import existing_file


def main(arguments: Sequence[str]) -> None:
    """Generate text with a trained model: words separated by spaces, and a line feed for each <eos>."""
    example = "-model runs/ptb/funnel/best.pt -prompt 'the company'"
    parser = Parser("lm_generate", example, description=main.__doc__)
    add = parser.add_argument
    add("-model", type=existing_file, required=True, metavar="FILE", help="checkpoint written by lm_train")
    add("-prompt", default="", metavar="TEXT", help="words to continue (default: start of a line)")
    add("-length", type=positive, default=100, metavar="N", help="words to generate (default: 100)")
    add("-temperature", type=float, default=1.0, metavar="X", help="0 for greedy decoding (default: 1)")
    add("-top_k", type=int, metavar="K", help="sample from the K best words (default: from all)")
    add("-seed", type=int, default=1, metavar="S", help="random seed (default: 1)")
    add(
        "-samples",
        type=positive,
        default=1,
        metavar="N",
        help="texts to generate, separated by --- (default: 1)",
    )
    add("-allow_unknown", action="store_true", help="allow <unk> in the output")
    add("-device", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: auto)")
    options = parser.parse_args(list(arguments))
    if options.samples > 1 and options.temperature == 0:
        raise UserError("samples has no effect with temperature 0: all texts would be the same; remove it")
    sampling = Sampling(options.temperature, options.top_k)
    trained = load_model(options.model, chosen_device(options.device))
    vocabulary = Vocabulary(trained.words)
    if not options.allow_unknown:
        sampling = dataclasses.replace(sampling, forbidden=(vocabulary.unk,))
    prompt_words = options.prompt.replace("\n", f" {EOS} ").split()
    unknown = [word for word in prompt_words if word not in vocabulary.index]
    if unknown:
        listed = ", ".join(dict.fromkeys(unknown))
        print(f"lm_generate: unknown words are read as <unk>: {listed}", file=sys.stderr)
    # Like every line, the prompt starts after an <eos>.
    prompt = [vocabulary.eos, *(vocabulary.index.get(word, vocabulary.unk) for word in prompt_words)]
    for sample in range(options.samples):
        if sample:
            print("---")
        words = generate(trained.model, prompt, options.length, sampling, options.seed + sample)
        write(prompt_words, (vocabulary.words[word] for word in words))


def write(prompt: Iterable[str], words: Iterable[str]) -> None:
    """Print a prompt and the generated words as they arrive, with a line feed for each ``<eos>``."""
    at_line_start = True
    for part in (prompt, words):
        for word in part:
            text = "\n" if word == EOS else word if at_line_start else f" {word}"
            print(text, end="", flush=True)
            at_line_start = word == EOS
    if not at_line_start:
        print()


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling options; raises `UserError` for values that are out of range or have no effect."""

    temperature: float = 1.0  # divides the log-probabilities; 0 for greedy decoding
    top_k: int | None = None  # sample from the best words only
    forbidden: tuple[int, ...] = ()  # ids of words that are never generated

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}, but it must be a number of at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}, but it must be at least 1; raise it")
        if self.top_k is not None and self.temperature == 0:
            raise UserError("top_k has no effect with temperature 0; remove one of them")


@torch.no_grad()
def generate(
    model: LanguageModel, prompt: Sequence[int], length: int, sampling: Sampling, seed: int
) -> Iterator[int]:
    """Yield the ids of `length` words after those of a prompt, which has at least one.

    The model is in evaluation mode during generation.

    Raises:
        UserError: the scores of the model are not finite, or no word is allowed.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    with evaluating(model):
        state = model.initial_state(1)
        ids = torch.tensor([list(prompt)], device=device)
        for _ in range(length):
            output = model(ids, state)
            state = output.state
            log_probs = model.embedding.log_prob(output.hidden[0, -1]).float().cpu()  # (V,)
            if log_probs.isnan().any():
                raise UserError("the model scores are not finite: training diverged; use another checkpoint")
            word = choose(log_probs, sampling, generator)
            yield word
            ids = torch.tensor([[word]], device=device)


def choose(log_probs: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample a word from log-probabilities ``(V,)``; raises `UserError` if no word is allowed."""
    log_probs = log_probs.clone()
    log_probs[list(sampling.forbidden)] = -torch.inf
    if not log_probs.isfinite().any():
        raise UserError("no word can be generated: the vocabulary has only forbidden words")
    if sampling.temperature == 0:
        return int(log_probs.argmax())
    if sampling.top_k is not None and sampling.top_k < len(log_probs):
        best = log_probs.topk(sampling.top_k).indices
        log_probs = torch.full_like(log_probs, -torch.inf).index_copy_(0, best, log_probs[best])
    # Subtracting the maximum avoids overflow with small temperatures.
    temperature = max(sampling.temperature, torch.finfo(log_probs.dtype).tiny)
    weights = ((log_probs - log_probs.max()) / temperature).exp()
    return int(torch.multinomial(weights, 1, generator=generator))


if __name__ == "__main__":
    from lm.cli import generate as command

    sys.exit(command())
