"""Training speed of ``onmt_train``, against OpenNMT-py's command and a plain loop with ``nn.Transformer``.

All train the small Transformer of a recipe on generated text, in turn. Commands are measured from the first
to the last report. If other programs use the CPU, compare the CPU time with one thread.

    OMP_NUM_THREADS=1 python -m benchmarks.translation
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measuring import markdown, parser_of, publish
from benchmarks.preprocessing import Language
from recipes.common.recipe import find_recipe
from recipes.common.tools import read_lines, run_main, write_yaml
from shared_embeddings.utils.command_line import positive
from shared_embeddings.utils.errors import UserError
from shared_embeddings.utils.files import write_lines
from shared_embeddings.utils.reading import read_yaml

# The entry points, in processes of their own.
COMMANDS = {
    "OpenNMT-py": "from onmt.bin.train import main",
    "onmt_train": "from nmt.cli import train as main",
}
PLAIN = "plain loop"
PAIRS, WORDS, VOCABULARY = 20_000, 12, 4000
FEW = 20  # steps of a report, and before the measured ones
_TOKENS = re.compile(r"bsz: *\d+/ *(\d+)/")


def write_corpus(folder: Path, pairs: int) -> None:
    """Write text in two languages, its shared vocabulary, and the configuration of a training."""
    counts: Counter[str] = Counter()
    for side, name in enumerate(("source", "target")):
        lines = list(islice(Language(side, VOCABULARY // 2, WORDS, seed=1).sentences(), pairs))
        write_lines(folder / name, lines)
        counts.update(word for line in lines for word in line.split())
    vocabulary = folder / "vocabulary"
    write_lines(vocabulary, (f"{word}\t{count}" for word, count in counts.most_common()))
    paths = {"path_src": str(folder / "source"), "path_tgt": str(folder / "target"), "transforms": []}
    settings = {
        "data": {"corpus_1": paths},
        "src_vocab": str(vocabulary),
        "tgt_vocab": str(vocabulary),
        "report_every": FEW,
        "valid_steps": 10**6,
        "save_checkpoint_steps": 10**6,
    }
    # In fp32, with the options of `onmt_train` that both commands know.
    options = find_recipe("multi30k_ende").rows["standard_fp32"].train
    model = {name: value for name, value in options.items() if name != "autocast"}
    write_yaml(folder / "config.yaml", model | settings)


def command_speeds(name: str, config: Path, steps: int) -> tuple[float, float]:
    """Target tokens for a wall-clock and a CPU second of a command, from its first to its last report."""
    start = f"import sys; {COMMANDS[name]}; sys.exit(main())"
    options = ["-config", config, "-train_steps", FEW + steps, "-save_model", config.parent / name]
    command = [sys.executable, "-c", start, *map(str, options)]
    # At each report: the clocks, and the tokens of a batch since the last one.
    reports: list[tuple[float, float, int]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if match := _TOKENS.search(line):
                values = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                processor = (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")
                reports.append((time.perf_counter(), processor, int(match[1])))
    if process.returncode or len(reports) < 2:
        raise UserError(f"{name}: the training of {steps} steps ended with status {process.returncode}")
    tokens = FEW * sum(size for *_, size in reports[1:])
    first, *_, last = reports
    return tokens / max(last[0] - first[0], 1e-9), tokens / max(last[1] - first[1], 1e-9)


class PlainTransformer(nn.Module):
    """``nn.Transformer`` of a configuration, with one table for source, target and output."""

    def __init__(self, config: dict[str, Any], num_words: int) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.table = nn.Embedding(num_words, width)
        self.places = nn.Embedding(512, width)
        sizes = (width, config["heads"], config["enc_layers"], config["dec_layers"])
        self.layers = nn.Transformer(*sizes, config["transformer_ff"], config["dropout"][0], batch_first=True)
        self.smoothing = config["label_smoothing"]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The loss of padded ids ``(B, S)`` and ``(B, T)``, where 0 is padding."""
        inputs, expected = target[:, :-1], target[:, 1:]
        both = [self.table(ids) + self.places.weight[: ids.size(1)] for ids in (source, inputs)]
        mask = torch.ones(inputs.size(1), inputs.size(1), dtype=torch.bool).triu(1)
        hidden = self.layers(
            *both,
            tgt_mask=mask,
            src_key_padding_mask=source.eq(0),
            tgt_key_padding_mask=inputs.eq(0),
            memory_key_padding_mask=source.eq(0),
        )
        logits = F.linear(hidden, self.table.weight).flatten(0, 1)
        return F.cross_entropy(logits, expected.flatten(), ignore_index=0, label_smoothing=self.smoothing)


def plain_batches(folder: Path, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Padded batches ``(B, S)``, ``(B, T)`` of at most `size` tokens a side, of similar lengths."""
    words = (line.split()[0] for line in read_lines(folder / "vocabulary"))
    ids = {word: number for number, word in enumerate(words, start=3)}
    sides = []
    for name in ("source", "target"):
        text = (line.split() for line in read_lines(folder / name))
        sides.append([torch.tensor([1, *(ids[word] for word in line), 2]) for line in text])
    pairs = sorted(zip(*sides, strict=True), key=lambda pair: (len(pair[1]), len(pair[0])))
    chosen: list[tuple[Tensor, Tensor]] = []
    batches = []
    for pair in pairs:
        longest = max(len(side) for sides in (*chosen, pair) for side in sides)
        if chosen and longest * (len(chosen) + 1) > size:
            batches.append(chosen)
            chosen = []
        chosen.append(pair)
    batches.append(chosen)
    for number in torch.randperm(len(batches)).tolist():
        source, target = (
            nn.utils.rnn.pad_sequence(list(side), batch_first=True) for side in zip(*batches[number])
        )
        yield source, target


def plain_speeds(folder: Path, steps: int) -> tuple[float, float]:
    """Target tokens for each wall-clock and each CPU second of the plain loop."""
    torch.manual_seed(0)
    config = read_yaml(folder / "config.yaml")
    batches = list(islice(plain_batches(folder, config["batch_size"]), FEW + steps))
    model = PlainTransformer(config, len(read_lines(folder / "vocabulary")) + 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, config["adam_beta2"]))

    def train(part: list[tuple[Tensor, Tensor]]) -> int:
        for source, target in part:
            optimizer.zero_grad()
            model(source, target).backward()
            optimizer.step()
        return sum(int(target.ne(0).sum()) - len(target) for _, target in part)

    train(batches[:FEW])
    start, processor = time.perf_counter(), time.process_time()
    tokens = train(batches[FEW:])
    return tokens / (time.perf_counter() - start), tokens / (time.process_time() - processor)


def measure(repeats: int, steps: int) -> dict[str, list[float]]:
    """Median target tokens for each wall-clock and each CPU second, by program; the programs take turns."""
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in (PLAIN, *COMMANDS)}
    for repeat in range(repeats):
        print(f"measuring, {repeat + 1} of {repeats} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_corpus(folder, PAIRS)
            speeds[PLAIN].append(plain_speeds(folder, steps))
            for command in COMMANDS:
                speeds[command].append(command_speeds(command, folder / "config.yaml", steps))
    return {name: [statistics.median(column) for column in zip(*runs)] for name, runs in speeds.items()}


def as_table(measured: dict[str, list[float]]) -> str:
    """Format tokens per second, and per CPU second relative to OpenNMT-py, as a Markdown table."""
    base = measured["OpenNMT-py"][1]
    rows = [
        [name, *(f"{value:,.0f}" for value in values), f"{values[1] / base:.2f}"]
        for name, values in measured.items()
    ]
    return markdown(["program", "tokens/s", "tokens per CPU second", "ratio to OpenNMT-py"], rows)


def main(arguments: Sequence[str]) -> None:
    """Measure and publish."""
    parser = parser_of("benchmarks.translation", __doc__, threads=1)
    parser.add_argument("--steps", type=positive, default=200, help="measured steps (default: 200)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    record: dict[str, Any] = {"repeats": options.repeats, "steps": options.steps}
    record |= {"torch": torch.__version__, "measured": measure(options.repeats, options.steps)}
    publish(record, as_table(record["measured"]), "translation", options)


if __name__ == "__main__":
    raise SystemExit(run_main("translation", main))
