"""Runs commands of README.md and docs/methods.md as a newcomer would: word by word, in a new environment.

`MODEL` is a tiny model that is made here, or a folder given as the argument; `FILE` is the documentation.
Prints the output and the minutes of every block, and exits with 1 at the first one that fails.

    python scripts/walk_readme.py [MODEL]
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The sections whose blocks are run; `make demo` and `make test` are run by .ci/run.
SECTIONS = ("Shrink a model", "In Python")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Makes the model of two layers, with the packages that the first command installs.
MAKE_MODEL = """
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
pieces = Tokenizer(models.BPE())
pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
pieces.train(["FILE"], trainers.BpeTrainer(vocab_size=4000, special_tokens=["<s>"]))
PreTrainedTokenizerFast(tokenizer_object=pieces, bos_token="<s>", pad_token="<s>").save_pretrained("MODEL")
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=len(pieces.get_vocab()), tie_word_embeddings=True, **sizes)
LlamaForCausalLM(config).save_pretrained("MODEL")
"""


def blocks(text: str) -> list[list[str]]:
    """The commands of the sections: lines of shell blocks, and whole Python programs."""
    commands = []
    for section in text.split("\n## "):
        if section.partition("\n")[0] in SECTIONS:
            for language, code in _BLOCK.findall(section):
                if language == "python":
                    commands.append(["python", "-c", code])
                elif not language:
                    commands += [["bash", "-c", line] for line in code.splitlines()]
    return commands


def walk(folder: Path, model: Path | None) -> int:
    """Run everything in a copy below a folder, and return the exit status."""
    copy = folder / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "runs", "site"))
    venv.create(folder / "venv", with_pip=True)
    outside = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))
    }
    environment = {**outside, "PATH": f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}"}
    environment["PIP_CONSTRAINT"] = str(ROOT / "requirements" / "torch.txt")  # the tested version
    texts = [path.read_text(encoding="utf-8") for path in sorted(copy.rglob("*.md"))]
    (copy / "FILE").write_text("\n".join(texts), encoding="utf-8")
    start = time.monotonic()
    pages = [(copy / page).read_text(encoding="utf-8") for page in ("README.md", "docs/methods.md")]
    for number, command in enumerate(blocks("\n".join(pages))):
        if number == 1 and model is not None:
            (copy / "MODEL").symlink_to(model.resolve(), target_is_directory=True)
        elif number == 1:
            subprocess.run(["python", "-c", MAKE_MODEL], cwd=copy, env=environment, check=True)
        print(f"$ {command[-1]}", flush=True)
        began = time.monotonic()
        status = subprocess.run(command, cwd=copy, env=environment).returncode
        print(f"({(time.monotonic() - began) / 60:.1f} minutes)\n", flush=True)
        if status:
            print(f"README.md: this command exits with {status}", file=sys.stderr)
            return 1
    print(f"README.md: all commands ran in {(time.monotonic() - start) / 60:.1f} minutes, downloads included")
    return 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.exit(walk(Path(name), Path(sys.argv[1]) if len(sys.argv) > 1 else None))
