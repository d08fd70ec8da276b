"""The command ``lm_generate``: generates text with a trained model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from lm.arguments import add_device, chosen_device
from lm.checkpoint import load_model
from lm.data.vocabulary import EOS, Vocabulary
from lm.evaluate.generation import Sampling, generate
from lm.randomness import SEEDS
from shared_embeddings.errors import UserError
from shared_embeddings.utils.command_line import Parser
from shared_embeddings.utils.path_options import PathOption

SEPARATOR = "---"


def main(arguments: Sequence[str]) -> None:
    """Generate text with a trained model: words separated by spaces, and a line feed for each <eos>."""
    parser = Parser("lm_generate", description=main.__doc__)
    add = parser.add_argument
    add("-model", type=PathOption.FILE, required=True, metavar="FILE", help="checkpoint written by lm_train")
    add("-prompt", default="", metavar="TEXT", help="words to continue (default: start of a line)")
    add("-length", type=int, default=100, metavar="N", help="words to generate (default: 100)")
    add("-temperature", type=float, default=1.0, metavar="X", help="0 for greedy decoding (default: 1)")
    add("-top_k", type=int, metavar="K", help="sample from the K best words (default: from all)")
    add("-seed", type=int, default=1, metavar="S", help="random seed (default: 1)")
    add("-samples", type=int, default=1, metavar="N", help="texts to generate, separated by --- (default: 1)")
    add("-allow_unknown", action="store_true", help="allow <unk> in the output")
    add_device(parser)
    options = parser.parse_args(list(arguments))
    if options.samples < 1:
        raise UserError(f"samples is {options.samples}, but it must be at least 1; raise it")
    if not -SEEDS <= options.seed < SEEDS:
        raise UserError(f"seed is {options.seed}, but it must be from -2**63 to below 2**63")
    try:
        options.prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"prompt {options.prompt!r} is not UTF-8; convert it") from None
    if options.samples > 1 and options.temperature == 0:
        raise UserError("samples has no effect with temperature 0: all texts would be the same; remove it")
    trained = load_model(options.model, chosen_device(options.device))
    vocabulary = Vocabulary(trained.words, [0] * len(trained.words))
    prompt = encode_prompt(options.prompt, vocabulary)
    forbidden = () if options.allow_unknown else (vocabulary.unk,)
    sampling = Sampling(options.temperature, options.top_k, forbidden)
    for sample in range(options.samples):
        if sample:
            print(SEPARATOR)
        words = generate(trained.model, prompt, options.length, sampling, options.seed + sample)
        write(options.prompt.replace("\n", f" {EOS} ").split(), (vocabulary.words[word] for word in words))


def encode_prompt(prompt: str, vocabulary: Vocabulary) -> list[int]:
    """Ids of a prompt, starting with ``<eos>`` like every line.

    Unknown words become ``<unk>`` with a warning on stderr.
    """
    words = prompt.replace("\n", f" {EOS} ").split()
    unknown = [word for word in words if word not in vocabulary.index]
    if unknown:
        print(
            f"lm_generate: unknown words are read as <unk>: {', '.join(dict.fromkeys(unknown))}",
            file=sys.stderr,
        )
    return [vocabulary.eos, *(vocabulary.index.get(word, vocabulary.unk) for word in words)]


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


if __name__ == "__main__":
    from lm.cli import generate as command

    command()
