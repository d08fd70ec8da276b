"""The method and the codec in docs/adding_a_method.md work everywhere once they are registered."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.shared_embeddings.hf import models

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "adding_a_method.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the documented method and codec, which work as modules and as plug-ins of pytest."""
    for place, name in ((1, "hashed"), (2, "even")):
        code = DOCUMENT.split("```python\n")[place].split("```")[0]
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    return tmp_path


def run(folder: Path, *command: str, cwd: Path = ROOT, **environment: str) -> str:
    """The output of a Python process that must succeed and can import what is in the folder."""
    paths = {"PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **paths, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def command(folder: Path, *arguments: str) -> str:
    """The output of `shared-embeddings` with the method."""
    code = "import sys, hashed; from shared_embeddings.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return run(folder, "-c", code, *arguments)


@pytest.mark.slow
def test_commands_find_the_method(folder: Path) -> None:
    sizes = ["--vocab-size", "1000", "--dim", "32"]
    listed = command(folder, "methods")
    assert "hashed: the sum of two rows" in listed
    assert "buckets" in command(folder, "methods", "hashed")
    counted = json.loads(command(folder, "params", "--method", "hashed", *sizes, "--buckets", "50", "--json"))
    assert counted["total"] == 50 * 32
    suggestions = json.loads(command(folder, "suggest", *sizes, "--budget", "3200", "--json"))["suggestions"]
    assert {"buckets": 100} in [entry["options"] for entry in suggestions if entry["method"] == "hashed"]


@pytest.mark.slow
def test_compress_finds_options_for_a_target(folder: Path) -> None:
    words = [f"w{number} {number % 7} {number % 5}" for number in range(40)]
    (folder / "table.vec").write_text("\n".join(["40 2", *words]) + "\n")
    asked = ["--model", str(folder / "table.vec"), "--output", str(folder / "small")]
    report = command(folder, "compress", *asked, "--method", "hashed", "--size", "2x", "--fit-steps", "5")
    assert "hashed, buckets:" in report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "tests", "chosen", "least"),
    [
        # Scores of the example are computed with a table.
        ("hashed", "tests/shared_embeddings", "hashed and not allocate_no_table", 60),
        ("hashed", "tests/test_hosts.py::test_every_method_is_loaded_as_written", "lm-hashed", 1),
        ("hashed", "tests/nmt/test_training.py::test_train_save_load_translate", "hashed", 1),
        ("hashed", "tests/benchmarks/test_benchmarks.py", "can_be_measured", 2),
        ("even", "tests/shared_embeddings/contract", "example-even", 3),
    ],
    ids=["library", "lm", "nmt", "benchmarks", "codec"],
)
def test_contract_tests_run_unchanged(folder: Path, plugin: str, tests: str, chosen: str, least: int) -> None:
    options = ["-q", "-p", plugin, "-p", "no:cacheprovider", tests, "-k", chosen]
    passed = re.search(r"(\d+) passed", run(folder, "-m", "pytest", *options))
    assert passed is not None and int(passed[1]) >= least


# Takes the documented codec, in module `even`, from a table to files, with the library.
WITH_THE_LIBRARY = """
import contextlib, io, sys, torch, even
import shared_embeddings as se
from pathlib import Path
from benchmarks import decoding, fitting
from shared_embeddings.cli.main import main
from shared_embeddings.compress.search import candidates
from shared_embeddings import hf
from tests.shared_embeddings.hf.models import scores

def compress(model, output):
    asked = ["--method", "quantized", "--codec", "even", "--bits", "4", "--store", "fp16"]
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        code = main(["compress", "--model", model, "--output", output, *asked])
    return code, errors.getvalue()

built = se.build("quantized", num_embeddings=9, embedding_dim=8, bits=2, codec="even")
assert built.logits(torch.randn(2, 8)).shape == (2, 9)
rows = torch.randn(200, 32)
_, report = se.fit("quantized", rows, bits=4, codec="even")
assert report.relative_error < 0.15
assert "even" in [candidate.options.get("codec") for _, candidate in candidates()]
assert "even" in se.get_method_config("quantized").presets(40, 16).examples
assert "even, 4 bits" in [table.name for table in decoding.TABLES]
assert "quantized, even, 4 bits" in fitting.NAMES
with contextlib.redirect_stdout(io.StringIO()) as listed:
    main(["methods"])
assert "even: evenly spaced levels" in " ".join(listed.getvalue().split())

for model, output in (("model", "small"), ("table.vec", "small.safetensors")):
    found = compress(model, output)
    assert found[0] == 0, found
model = hf.load(Path("small"))
assert model.shared_embeddings["words"].options.codec == "even"
torch.save(scores(model), "scores.pt")

# Without a decoder, models are refused before anything is fitted.
even.EvenCodec.standalone = ()
even.EvenCodec.encode = None
Path("others").mkdir()
for model, output in (("model", "other"), ("table.vec", "others/table.safetensors")):
    code, errors = compress(model, output)
    # Without the progress bar of transformers.
    lines = [line for line in errors.splitlines() if "Loading weights" not in line and line.strip()]
    assert code == 2 and len(lines) == 1 and "codec even has no stand-alone decoder" in lines[0], errors
    assert not Path(output).exists()
"""

WITHOUT_THE_LIBRARY = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained("small", trust_remote_code=True).eval()
ids = torch.tensor({ids})
with torch.no_grad():
    found = model(ids, attention_mask=torch.ones_like(ids)).logits
torch.testing.assert_close(found, torch.load("scores.pt"), rtol=1e-4, atol=1e-4)
assert "shared_embeddings" not in sys.modules
"""


def test_a_codec_is_one_file(folder: Path) -> None:
    """From the file to compressed models, with the library and without."""
    pytest.importorskip("onnxruntime")
    models.write("gemma", folder / "model")
    vectors = torch.randn(60, 16, generator=torch.Generator().manual_seed(0))
    lines = [f"w{word} " + " ".join(map(str, row)) for word, row in enumerate(vectors.tolist())]
    (folder / "table.vec").write_text("\n".join(["60 16", *lines]) + "\n")
    run(folder, "-c", WITH_THE_LIBRARY, cwd=folder)
    modules = str(folder / "modules")
    program = WITHOUT_THE_LIBRARY.format(ids=models.IDS.tolist())
    run(folder, "-c", program, cwd=folder, PYTHONPATH="", HF_MODULES_CACHE=modules, HF_HUB_OFFLINE="1")
    spec = importlib.util.spec_from_file_location("loader", folder / "load_vectors.py")
    assert spec is not None and spec.loader is not None
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    decoded = torch.from_numpy(loader.load(folder / "small.safetensors").vectors)
    assert float((decoded - vectors).norm() / vectors.norm()) < 0.15
