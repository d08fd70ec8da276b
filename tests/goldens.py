"""Records what methods, hosts and files compute, to compare a refactoring with the code before it.

``python -m tests.goldens record FILE`` before, ``python -m tests.goldens compare FILE`` after, on the same
machine: results depend on the processor in their last bits. ``--only NAME`` selects groups.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import math
import random
import re
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import shared_embeddings as se
from shared_embeddings.cli.main import main
from shared_embeddings.compress import host as host_module
from tests.helpers import as_method, example, hosts_of_this_tree
from tests.lm.runs import write_corpus, write_model
from tests.test_hosts import MAKERS, opened

# A value is a text or a list of numbers; numbers may differ by rounding.
Records = dict[str, Any]
TOLERANCE = 2e-5
# Fields of reports that differ from run to run; on_disk is of a folder with a model card.
CHANGING = "seconds tokens_per_second memory rss peak speed time version date path decoding on_disk".split()
CODECS = ("uniform", "trellis", "spectral")


def describe(tensor: Tensor) -> list[float]:
    """Numbers that change with the content of a tensor: its shape, moments, and eight of its values."""
    values = tensor.detach().to("cpu").double().flatten()
    if not values.numel():
        return [float(size) for size in tensor.shape]
    sample = values[torch.linspace(0, values.numel() - 1, 8).long()]
    weights = torch.linspace(1, 2, values.numel(), dtype=torch.float64)
    moments = [values.sum(), values.abs().sum(), values.square().sum(), (values * weights).sum()]
    return [*map(float, tensor.shape), *map(float, moments), *sample.tolist()]


def describe_file(path: Path) -> dict[str, Any]:
    """Content of a file or folder: its tensors, JSON without what changes, digests of other files."""
    if path.is_dir():
        parts = sorted(part for part in path.rglob("*") if part.is_file())
        return {f"{part.relative_to(path)}:{k}": v for part in parts for k, v in describe_file(part).items()}
    with contextlib.suppress(SafetensorError):
        return {name: describe(tensor) for name, tensor in load_file(path).items()}
    if path.suffix == ".json":
        return {"json": json.dumps(without_changing(json.loads(path.read_text())), sort_keys=True)}
    if zipfile.is_zipfile(path):
        import nmt.checkpoints  # noqa: F401  # lets torch read the options

        with contextlib.suppress(Exception):
            content = torch.load(path, map_location="cpu", weights_only=True)
            return {name: describe(tensor) for name, tensor in tensors_of(content)}
        with zipfile.ZipFile(path) as archive:
            return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}
    content = path.read_bytes()
    if path.suffix == ".md":  # a model card states speeds, and sizes that reports have
        content = b"\n".join(line for line in content.split(b"\n") if not re.search(rb"\d", line))
    return {"sha256": hashlib.sha256(content).hexdigest()}


def tensors_of(content: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested mappings and lists, with the path to each."""
    if isinstance(content, Tensor):
        yield name, content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from tensors_of(value, f"{name}/{key}")
    elif isinstance(content, (list, tuple)):
        for number, value in enumerate(content):
            yield from tensors_of(value, f"{name}/{number}")


def without_changing(content: Any) -> Any:
    """A report without times, speeds, memory, versions and paths."""
    if isinstance(content, dict):
        return {
            key: without_changing(value)
            for key, value in content.items()
            if not any(part in key for part in CHANGING) and not (isinstance(value, str) and "/" in value)
        }
    return [without_changing(value) for value in content] if isinstance(content, list) else content


def record_methods(records: Records, folder: Path) -> None:
    """Look-ups, scores, losses and gradients of every case of the contract tests."""
    from tests.shared_embeddings.cases import CASES

    for case in CASES:
        module = case.build()
        module.train()
        ids = torch.randint(0, case.num_embeddings, (4, 5))
        records[f"{case.name} rows"] = describe(module(ids))
        loss = module(ids).square().sum()
        if case.output:
            hidden = case.hidden(4, 5)
            loss = loss + module.cross_entropy(hidden, ids, label_smoothing=0.1)
            records[f"{case.name} scores"] = describe(module.log_prob(hidden))
        loss.backward()  # type: ignore[no-untyped-call]
        records[f"{case.name} loss"] = [loss.item()]
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                records[f"{case.name} gradient {name}"] = describe(parameter.grad)
        records[f"{case.name} counts"] = json.dumps(module.counts(), sort_keys=True)


def run(*asked: object) -> str:
    """What the command prints, or its error line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(argument) for argument in asked])
    return "" if status == 0 else err.getvalue().strip().splitlines()[-1]


def record_files(records: Records, folder: Path) -> None:
    """Compressed, exported and trimmed files of every host."""
    for host, make in MAKERS.items():
        place = folder / host
        place.mkdir()
        with contextlib.redirect_stdout(io.StringIO()):
            model, text = make(place)
            if host == "lm":  # the smallest vocabulary
                data = write_corpus(place / "letters")
                model, text = write_model(model, data), place / "letters" / "valid.txt"
        text = text.with_name("test.src") if host == "nmt" else text
        sizes = opened(host).read(model).embeddings()[0].table().shape
        named = {
            f"quantized-{codec}-{bits}": ["--method", "quantized", "--bits", bits, "--codec", codec]
            for codec in CODECS
            for bits in (4, 1.5)
        }
        stores = ("fp32", "fp16", "int8")
        named |= {f"standard-{store}": ["--method", "standard", "--store", store] for store in stores}
        for method in se.methods():
            options = as_method(method, example(method, *sizes))
            named[f"method-{method}"] = ["--method", options, "--fit-steps", 5]
        named["choice"] = ["--size", "4x", "--text", text]
        named["counts"] = ["--method", "quantized", "--bits", 2, "--text", text]
        for name, options in named.items():
            output, report = place / f"{name}.pt", place / f"{name}.json"
            error = run("compress", "--model", model, *options, "--output", output, "--report", report)
            key = f"{host} {name}"
            if error:
                records[f"{key} error"] = error.replace(str(place), "")
                continue
            for part, value in describe_file(output).items():
                records[f"{key} {part}"] = value
            records[f"{key} report"] = json.dumps(
                without_changing(json.loads(report.read_text())), sort_keys=True
            )
            if name in ("standard-fp32", "standard-int8", "quantized-uniform-4", "method-funnel"):
                for form in ("onnx", "onnx-embeddings", "vec", "dense"):
                    exported = place / f"{name}.{form}"
                    failed = run("export", "--model", output, "--format", form, "--output", exported)
                    content = {"error": failed.replace(str(place), "")} if failed else describe_file(exported)
                    records.update({f"{key} {form} {part}": value for part, value in content.items()})
        trimmed = place / "trimmed.pt"
        records[f"{host} trim error"] = run(
            "trim", "--model", model, "--text", text, "--output", trimmed
        ).replace(str(place), "")
        if trimmed.exists():
            records.update(
                {f"{host} trimmed {part}": value for part, value in describe_file(trimmed).items()}
            )


def record_trainings(records: Records, folder: Path) -> None:
    """Parameters after ten steps of both hosts, with several methods and with distillation."""
    from tests.lm.runs import run as train_lm
    from tests.lm.runs import settings, small_corpus
    from tests.nmt.conftest import Host

    (folder / "lm").mkdir()
    data = small_corpus(folder / "lm")
    for method in se.methods():
        save = folder / "lm" / method
        embedding = {"method": method, **example(method, len_of(data), 16)}
        train_lm(settings(data, save, embedding=embedding, embedding_dim=16, steps=10))
        records.update(
            {f"lm {method} {part}": value for part, value in describe_file(save / "last.pt").items()}
        )
    (folder / "nmt").mkdir()
    host = Host(folder / "nmt")
    for method in se.methods():
        embedding = {"method": method, **example(method, 88, 16)}
        model = host.train(f"model_{method}", train_steps=10, save_checkpoint_steps=10, embedding=embedding)
        records.update({f"nmt {method} {part}": value for part, value in describe_file(model).items()})
    records["nmt translation"] = "\n".join(host.translate(model))


def len_of(data: Path) -> int:
    """The number of words of a corpus."""
    from lm.data.corpus import load_corpus

    return len(load_corpus(data).vocabulary.words)


GROUPS: dict[str, Callable[[Records, Path], None]] = {
    "methods": record_methods,
    "files": record_files,
    "trainings": record_trainings,
}


def record(groups: list[str]) -> Records:
    """All records, each group from the same random state."""
    records: Records = {}
    host_module.entry_points = hosts_of_this_tree  # type: ignore[attr-defined]
    for name in groups:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            try:
                GROUPS[name](records, Path(folder))
            except (Exception, SystemExit):
                records[f"{name} failed"] = traceback.format_exc()
                print(records[f"{name} failed"], file=sys.stderr)
    return records


def differs(old: Any, new: Any) -> bool:
    """Whether a value differs by more than rounding."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        size = max(map(abs, old), default=0.0)
        limits = [TOLERANCE * max(abs(value), 1e-3 * size, 1e-6) for value in old]
        return not all(
            abs(value - other) <= limit or value == other or (math.isnan(value) and math.isnan(other))
            for value, other, limit in zip(old, new, limits)
        )
    return bool(old != new)


def compare(old: Records, new: Records) -> list[str]:
    """The names of records that differ, with both values."""
    lines = []
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            lines.append(f"{name}: only {'after' if name in new else 'before'}")
        elif differs(old[name], new[name]):
            lines.append(f"{name}:\n  before {str(old[name])[:300]}\n  after  {str(new[name])[:300]}")
    return lines


def run_command() -> int:
    """Record to a file, or compare with one; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    chosen = parser.parse_args()
    records = record(chosen.only)
    if chosen.action == "record":
        chosen.file.write_text(json.dumps(records))
        print(f"{len(records)} records")
        return 0
    old = json.loads(chosen.file.read_text())
    if chosen.only != list(GROUPS):
        old = {name: value for name, value in old.items() if name in records}
    lines = compare(old, records)
    same = sum(old.get(name) == value for name, value in records.items())
    print("\n".join(lines))
    print(f"{len(records)} records, {same} the same to the last digit, {len(lines)} differ")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(run_command())
