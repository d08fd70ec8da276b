"""Commands that write files, and small inputs for them, for tests and drills."""

from __future__ import annotations

import shutil
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import NamedTuple

from tests.lm.command_line import write_corpus, write_model
from tests.nmt.conftest import Host

SENTENCES = "a b c d\nc d a b\nb b e f\n"
HOSTS = {
    "hf": "shared_embeddings.hf.adapter",
    "lm": "lm.adapter",
    "nmt": "nmt.adapter",
    "vectors": "shared_embeddings.word_vectors.adapter",
}


def hosts_of_this_tree(group: str) -> list[EntryPoint]:
    """The adapters of this source tree, whatever is installed."""
    return [EntryPoint(name, f"{module}:Adapter", group) for name, module in HOSTS.items()]


class Writer(NamedTuple):
    """A command that writes.

    Attributes:
        command: its name.
        arguments: separated by spaces; inputs are in ``{inputs}``, outputs start with ``@``.
        force: the option that lets it replace outputs; None if it always does.
        is_folder: whether its first output is a folder.
    """

    command: str
    arguments: str
    force: str | None = "--force"
    is_folder: bool = False

    def given(self, inputs: Path, folder: Path) -> list[str]:
        """Its arguments for inputs and outputs in two folders."""
        words = [word.replace("@", f"{folder}/") for word in self.arguments.split()]
        return [word.format(inputs=inputs) for word in words]

    def outputs(self, folder: Path) -> list[Path]:
        """Its outputs in a folder."""
        return [folder / word[1:] for word in self.arguments.split() if word.startswith("@")]


_COMPRESS = "compress --method projective --rank 2 --output @small --report @report.json --model"
WRITERS = {
    "onmt_characters": Writer("onmt_characters", "split -input {inputs}/text -output @out", None),
    "onmt_rerank": Writer(
        "onmt_rerank",
        "-source {inputs}/text -hypotheses {inputs}/text -n_best 1 -output @out",
        None,
    ),
    "onmt_character_vocab": Writer(
        "onmt_character_vocab", "-source {inputs}/text -target {inputs}/text -output @out", None
    ),
    "onmt_build_vocab": Writer(
        "onmt_build_vocab",
        "-config {inputs}/vocab.yaml -src_vocab @source.vocab -tgt_vocab @target.vocab -save_data @samples",
        "-overwrite",
    ),
    "onmt_translate": Writer(
        "onmt_translate",
        "-model {inputs}/nmt.pt -src {inputs}/long.src -output @out -beam_size 2 -max_length 5",
        None,
    ),
    "onmt_average_models": Writer("onmt_average_models", "-models {inputs}/nmt.pt -output @out.pt"),
    "onmt_release_model": Writer("onmt_release_model", "-model {inputs}/nmt.pt -output @out.pt"),
    "onmt_release_model to CTranslate2": Writer(
        "onmt_release_model", "-model {inputs}/nmt.pt -format ctranslate2 -output @out", is_folder=True
    ),
    "lm_prepare": Writer(
        "lm_prepare",
        "-train {inputs}/train.txt -valid {inputs}/text -test {inputs}/text -output @data",
        is_folder=True,
    ),
    "lm_eval": Writer("lm_eval", "-model {inputs}/lm.pt -data {inputs}/text -output @out.json"),
    "classes": Writer(
        "shared-embeddings",
        "classes --text {inputs}/text --vocab {inputs}/words --num-classes 2 --dim 3 --epochs 1 "
        "--output @out.npz --figure @out.png",
    ),
    "compress a language model": Writer("shared-embeddings", f"{_COMPRESS} {{inputs}}/lm.pt"),
    "compress a translation model": Writer("shared-embeddings", f"{_COMPRESS} {{inputs}}/nmt.pt"),
    "compress a folder": Writer("shared-embeddings", f"{_COMPRESS} {{inputs}}/gpt2", is_folder=True),
    "correlation": Writer(
        "shared-embeddings", "correlation --model {inputs}/lm.pt --output @pictures", is_folder=True
    ),
    "trim": Writer(
        "shared-embeddings", "trim --model {inputs}/lm.pt --text {inputs}/text --output @small", None
    ),
    "trim a translation model": Writer(
        "shared-embeddings", "trim --model {inputs}/nmt.pt --text {inputs}/test.src --output @small", None
    ),
}


def make_inputs(folder: Path) -> None:
    """Write the inputs of all `WRITERS`; the models are tiny."""
    from tests.shared_embeddings.hf.models import write as write_folder

    for name in ("text", "more"):
        (folder / name).write_text(SENTENCES * 20)
    (folder / "train.txt").write_text(SENTENCES * 2000)
    (folder / "words").write_text("a\nb\nc\nd\ne\nf\n")
    corpus = write_corpus(folder / "corpus", "a b c d e f")
    write_model(folder / "lm.pt", corpus)
    write_folder("gpt2", folder / "gpt2")
    host = Host(folder)
    (folder / "long.src").write_text((folder / "test.src").read_text() * 4)
    shutil.copyfile(host.train("model", train_steps=1, save_checkpoint_steps=1), folder / "nmt.pt")
    (folder / "vocab.yaml").write_text(
        f"data: {{corpus: {{path_src: {folder}/train.src, path_tgt: {folder}/train.tgt}}}}\nn_sample: -1\n"
    )
