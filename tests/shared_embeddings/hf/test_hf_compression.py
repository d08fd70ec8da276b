"""Compressing Hugging Face models by the command: decoders, encoders, without naming a method, recovery."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file

import shared_embeddings as se
from shared_embeddings import hf
from shared_embeddings.compress import session
from shared_embeddings.hf.word_layers import InputSide
from tests.helpers import CODES, as_method, every_word, example, main
from tests.shared_embeddings.hf.models import (
    DIM,
    FAMILIES,
    IDS,
    KINDS,
    WORDS,
    add_tokenizer,
    build,
    compress,
    save,
    scores,
    sentences,
    trim,
    write,
)
from tests.shared_embeddings.hf.test_hf_from_pretrained import hidden

# Every architecture once, with a table or at full rank by turns.
FULL_SIZE = {
    kind: ["standard"] if place % 2 else ["projective", "--rank", DIM]
    for place, kind in enumerate((*KINDS, *FAMILIES))
}


@pytest.mark.slow_except("gpt2", "bert", "marian")
@pytest.mark.parametrize("kind", FULL_SIZE)
def test_full_size_keeps_the_scores(tmp_path: Path, kind: str) -> None:
    method, *options = FULL_SIZE[kind]
    model = write(kind, tmp_path / "model")
    assert compress(tmp_path / "model", method, tmp_path / "same", *options) == 0
    same = hf.load(tmp_path / "same")
    assert type(same) is type(model)
    if kind in KINDS:
        assert set(same.shared_embeddings) == set(KINDS[kind][2])
    torch.testing.assert_close(scores(same), scores(model), atol=1e-4, rtol=0)


@pytest.mark.slow_except("llama", "bert")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_read_one_by_one(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same folder, from shards, and without building the model."""
    write(kind, tmp_path / "whole").save_pretrained(tmp_path / "model", max_shard_size="8KB")
    asked = ("--rank", 6, "--store", "int8")
    assert compress(tmp_path / "model", "projective", tmp_path / "built", *asked) == 0
    load: Any = transformers.PreTrainedModel.from_pretrained

    def without_memory(chosen: Any, *arguments: Any, device_map: Any = None, **settings: Any) -> Any:
        assert device_map == "meta"
        return load.__func__(chosen, *arguments, device_map=device_map, **settings)

    # The first one's configuration says that it is tied, the other's files have other names than its class.
    if kind not in ("t5_untied", "gpt_neox"):
        monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(without_memory))
    assert compress(tmp_path / "model", "projective", tmp_path / "same", *asked, "--no-check") == 0
    for name in ("config.json", "generation_config.json"):
        files = [file for folder in ("built", "same") if (file := tmp_path / folder / name).exists()]
        assert len(files) != 1 and len({file.read_bytes() for file in files}) <= 1
    built, same = (load_file(tmp_path / folder / "model.safetensors") for folder in ("built", "same"))
    assert built.keys() == same.keys() and all(torch.equal(built[name], same[name]) for name in built)


def test_without_running_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("gpt2", tmp_path / "model")
    model, small = tmp_path / "model", tmp_path / "small"
    assert main(["compress", "--model", str(model), "--output", str(small), "--no-check", "--bits", "4"]) == 2
    assert "check=False needs a method" in capsys.readouterr().err
    assert compress(model, "standard", small, "--no-check", "--validation", model) == 2
    assert "validation has no effect with check=False; remove" in capsys.readouterr().err
    report = ["--report", small / "report.json"]
    assert compress(model, "standard", small, "--no-check", *report) == 0
    assert compress(model, "standard", small, "--no-check", *report) == 2
    assert "small already exists" in capsys.readouterr().err
    assert compress(model, "standard", small, "--no-check", "--verbose", *report, "--force") == 0
    assert json.loads((small / "report.json").read_text())["method"] == "standard"
    printed = capsys.readouterr().out
    assert "could not verify that this model still works (check=False)" in printed
    assert "look-up and scores of the table alone on this CPU" in printed and "bytes in memory" in printed


def test_layers_of_another_task_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in BERT's published checkpoints, which were also trained to predict the next sentence."""
    torch.manual_seed(3)
    whole = transformers.BertForPreTraining(transformers.BertConfig(**KINDS["bert"][1]))
    whole.config.architectures = None
    whole.save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["BertForMaskedLM"]}))
    plain = transformers.BertForMaskedLM.from_pretrained(tmp_path / "model")
    assert compress(tmp_path / "model", "standard", tmp_path / "same") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "BertForMaskedLM does not use are dropped (4, such as bert.pooler.dense.bias)" in printed
    torch.testing.assert_close(scores(hf.load(tmp_path / "same")), scores(plain), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["ProphetNetForCausalLM", "ProphetNetForConditionalGeneration"])
def test_models_that_cannot_be_probed_are_compressed(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One has no position for the end of its longest input, the other scores two tokens at each."""
    chosen, stack = getattr(transformers, name), ("encoder", "decoder")
    settings = {f"{part}_ffn_dim": 24 for part in stack} | {
        f"num_{part}_attention_heads": 2 for part in stack
    }
    layers = {f"num_{part}_layers": 1 for part in stack}
    config = chosen.config_class(
        vocab_size=WORDS, hidden_size=DIM, max_position_embeddings=32, **settings, **layers
    )
    model = chosen(config).eval()
    model.save_pretrained(tmp_path / "model")
    assert compress(tmp_path / "model", "standard", tmp_path / "same") == 0
    assert f"a {name} cannot be probed: " in capsys.readouterr().out
    torch.testing.assert_close(scores(hf.load(tmp_path / "same")), scores(model), atol=1e-5, rtol=0)


# Models with input tables beside that of words, and all their tables.
FURTHER = {
    "gemma4": ["per_layer_words", "words"],
    "Gemma3nForCausalLM": ["per_layer_words", "words"],
    "neomme": ["value_words", "words"],
    "BltForCausalLM": ["input_words", "ngrams", "output_words"],
    "Qwen4ExpForCausalLM": ["input_words", "ngrams_0", "ngrams_1", "output_words"],
}


@pytest.mark.slow_except("BltForCausalLM")
@pytest.mark.parametrize("kind", FURTHER)
def test_all_tables_in_8_bits(tmp_path: Path, kind: str, words: Path) -> None:
    """Scores and generated texts are the same; files are smaller by what the report says."""
    model, small, again = write(kind, tmp_path / "model"), tmp_path / "small", tmp_path / "again"
    add_tokenizer(tmp_path / "model")
    asked = ["--bits", 8, "--text", words, "--only-text", "--report", tmp_path / "report.json"]
    assert compress(tmp_path / "model", "quantized", small, *asked) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["calibration"].startswith("calibrated on text")
    for table in report["tables"]:
        assert table["stored_bytes"]["after"] < 0.35 * table["stored_bytes"]["before"]
    saved = sum(
        table["stored_bytes"]["before"] - table["stored_bytes"]["after"] for table in report["tables"]
    )
    files = [tmp_path / folder / "model.safetensors" for folder in ("model", "small")]
    before, after = (sum(tensor.nbytes for tensor in load_file(file).values()) for file in files)
    assert before - after == pytest.approx(saved, rel=0.02)
    hf.load(small).save_pretrained(again)
    for folder in (small, again):
        same, info = type(model).from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()) and sorted(same.shared_embeddings) == FURTHER[kind]
        # Rows that are read seldom have less than 8 bits.
        assert (scores(same) - scores(model)).norm() < 0.03 * scores(model).norm()
        if model.can_generate():
            asked_for = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 4, "do_sample": False}
            assert torch.equal(same.generate(IDS, **asked_for), model.generate(IDS, **asked_for))


@pytest.mark.slow_except("qwen2")
@pytest.mark.parametrize("kind", ["qwen2", "gemma4", "t5_untied", "marian", "marian_two_vocabularies"])
def test_a_quarter_of_the_bytes(tmp_path: Path, kind: str) -> None:
    write(kind, tmp_path / "model")
    asked = ["--size", "4x", "--report", tmp_path / "report.json"]
    assert compress(tmp_path / "model", "projective", tmp_path / "small", *asked) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    state = load_file(tmp_path / "small" / "model.safetensors")
    for table in report["tables"]:
        stored = [
            t.nbytes for name, t in state.items() if name.startswith(f"shared_embeddings.{table['name']}.")
        ]
        assert sum(stored) == table["stored_bytes"]["after"] <= table["stored_bytes"]["before"] / 4
        assert table["stored_bytes"]["before"] == 4 * WORDS * DIM
    assert sum(tensor.nbytes for tensor in state.values()) <= report["bytes_of_weights"]["after"] + 8
    files = list((tmp_path / "small").iterdir())
    assert report["bytes_on_disk"]["after"] == sum(file.stat().st_size for file in files)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model", "report.json", "small"]


@pytest.mark.slow_except("bert")
@pytest.mark.parametrize("kind", ["gemma", "bert", "t5", "marian"])
def test_both_sides_give_gradients_to_the_shared_table(tmp_path: Path, kind: str) -> None:
    write(kind, tmp_path / "model")
    assert compress(tmp_path / "model", "projective", tmp_path / "small", "--rank", 4) == 0
    model = hf.load(tmp_path / "small")
    codes = model.shared_embeddings["words"].codes
    never_read = 123
    assert never_read not in IDS
    model(input_ids=IDS, labels=IDS).loss.backward()
    # Words outside the input get gradients from the output only; with a frozen output, from the input only.
    assert codes.grad[never_read].abs().sum() > 0
    model.zero_grad()
    hidden = model.get_input_embeddings()(IDS)
    hidden.sum().backward()
    assert codes.grad[never_read].abs().sum() == 0 and codes.grad[IDS[0, 1]].abs().sum() > 0


BODIES = {
    "BertModel": "bert",
    "BertForSequenceClassification": "bert",
    "LlamaModel": "llama",
    "T5EncoderModel": "t5",
    "BartModel": "bart",
}
README = "---\nlicense: mit\n---\n\n# Sentences\n\nAn encoder.\n"


def sentence_encoder(folder: Path) -> Path:
    """A folder as sentence-transformers writes it."""
    save(folder, "bert")
    encoder = transformers.BertModel.from_pretrained(folder)
    encoder.save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 16}')
    (folder / "1_Pooling" / "own.py").write_text("raise SystemExit")
    (folder / "modules.json").write_text(
        json.dumps([{"idx": 0, "name": "0", "path": ""}, {"idx": 1, "name": "1", "path": "1_Pooling"}])
    )
    (folder / "README.md").write_text(README)
    return folder


@pytest.mark.parametrize("name", BODIES)
def test_input_only_encoder(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = getattr(transformers, name)
    torch.manual_seed(3)
    model = chosen(chosen.config_class(**KINDS[BODIES[name]][1])).eval()
    model.save_pretrained(tmp_path / "model")
    assert compress(tmp_path / "model", "projective", tmp_path / "same", "--rank", DIM, "--verbose") == 0
    printed = capsys.readouterr().out
    assert "look-up of the table alone on this CPU, one token at a time" in printed
    decoder = name == "BartModel"
    assert ("a BartModel cannot be probed" in printed) == decoder
    assert ("kept 100% of the predictions of the original (nearest neighbors of 250" in printed) != decoder
    for same in (hf.load(tmp_path / "same"), chosen.from_pretrained(tmp_path / "same")):
        assert type(same) is chosen and isinstance(same.get_input_embeddings(), InputSide)
        if "Classification" in name:
            assert torch.allclose(same(input_ids=IDS).logits, model(input_ids=IDS).logits, atol=1e-4)
        elif name == "T5EncoderModel":
            states = (body(input_ids=IDS).last_hidden_state for body in (same, model))
            torch.testing.assert_close(*states, atol=1e-4, rtol=0)
        else:
            torch.testing.assert_close(hidden(same), hidden(model), atol=1e-4, rtol=0)


def test_a_sentence_encoder(tmp_path: Path, text: Path) -> None:
    """Trimmed and compressed, with its other layers and its card; it can be replaced by ``--force``."""
    model, small, trimmed = sentence_encoder(tmp_path / "model"), tmp_path / "small", tmp_path / "trimmed"
    assert trim("--model", model, "--text", text, "--output", trimmed) == 0
    asked: list[Any] = ["--size", "4x", "--text", text, "--force"]
    for _ in range(2):
        assert compress(trimmed, "projective", small, *asked) == 0
    for folder in (trimmed, small):
        assert [file.name for file in (folder / "1_Pooling").iterdir()] == ["config.json"]
        assert (folder / "modules.json").read_bytes() == (model / "modules.json").read_bytes()
    card = (small / "README.md").read_text()
    assert "\nlicense: mit\n" in card and card.endswith("# Sentences\n\nAn encoder.\n")
    for expected in (
        "\nlibrary_name: sentence-transformers\n",
        "\npipeline_tag: sentence-similarity\n",
        "import shared_embeddings.hf\nfrom sentence_transformers import SentenceTransformer\n",
        "| table 'words' (embeddings.word_embeddings) | ",
        "table 'words': `{method: projective, rank: ",
        "numbers are stored as fp32",
        "nearest neighbors of 6 lines of text",
    ):
        assert expected in card
    tokenizer = transformers.AutoTokenizer.from_pretrained(small)
    encoder = transformers.AutoModel.from_pretrained(small)
    batch = tokenizer(sentences(3, 1), return_tensors="pt", padding=True)
    assert encoder(**batch).last_hidden_state.isfinite().all()


def test_a_sentence_encoder_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other layers are downloaded, too, but not other formats."""
    model, cache = sentence_encoder(tmp_path / "model"), tmp_path / "cache"
    (model / "onnx").mkdir()
    for file in ("onnx/config.json", "model.onnx"):
        (model / file).write_text("{}")

    def snapshot_download(name: str, **patterns: list[str]) -> str:
        files = [str(file.relative_to(model)) for file in model.rglob("*") if file.is_file()]
        for file in huggingface_hub.utils.filter_repo_objects(files, **patterns):
            (cache / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(model / file, cache / file)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    assert compress(Path("some/encoder"), "projective", tmp_path / "small", "--rank", 4, "--no-check") == 0
    assert (tmp_path / "small" / "1_Pooling" / "config.json").is_file()
    assert not (cache / "onnx").exists() and not (cache / "model.onnx").exists()


DTYPES = ("float32", "bfloat16", "float16", "float64")
RATIOS = (4, 8, 16, 32)
CODECS = get_args(get_type_hints(se.get_method_config("quantized"))["codec"])
WIDTH = 48


def check_compression(
    dtype: str, arguments: Sequence[object], folder: Path, capsys: pytest.CaptureFixture[str]
) -> bool:
    """A tiny model is compressed to one of its dtype, and its predictions are compared.

    Returns:
        False if the smallest embedding with these arguments is too large for the target.
    """
    settings = {**KINDS["gemma"][1], "hidden_size": WIDTH}
    torch.manual_seed(0)
    model = transformers.GemmaForCausalLM(transformers.GemmaConfig(**settings))
    model.to(getattr(torch, dtype)).save_pretrained(folder / "model")
    asked = ["compress", "--model", folder / "model", "--output", folder / "small", "--force", *arguments]
    status, printed = main([str(argument) for argument in asked]), capsys.readouterr()
    if status == 2 and "needs at least" in printed.err:
        return False
    assert status == 0, printed.err
    assert "Error" not in printed.out
    assert "kept" in printed.out and "could not verify" not in printed.out
    assert sorted(path.name for path in folder.iterdir()) == ["model", "small"]
    small = hf.load(str(folder / "small"))
    logits = scores(small)
    assert logits.dtype == small.dtype == getattr(torch, dtype) and logits.isfinite().all()
    return True


@pytest.mark.slow_except("bfloat16---bits=2")
@pytest.mark.parametrize(
    "size", [*(f"--size={ratio}x" for ratio in RATIOS), *(f"--bits={32 // ratio}" for ratio in RATIOS)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_methods_are_chosen_in_every_dtype(
    dtype: str, size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_compression(dtype, [size], tmp_path, capsys)


def runs() -> Iterator[Any]:
    """Every method and codec, in every dtype and at every ratio; one of each is quick."""
    # These have sizes of their own, or are never as small.
    fixed = ("alone", "define", "standard")
    methods = {name: ["--method", name, "--fit-steps", 5] for name in se.methods() if name != "adaptive"}
    names = [name for name in CODECS if name != "iq4_nl"]  # has 4 bits only
    codecs = {codec: ["--method", "quantized", "--codec", codec] for codec in names}
    for place, (name, how) in enumerate({**methods, **codecs}.items()):
        for dtype in DTYPES:
            sizes = {str(ratio): ["--size", f"{ratio}x"] for ratio in RATIOS}
            if name in fixed:
                sizes = {"example": ["--method", as_method(name, example(name, WORDS, WIDTH))]}
            for size, options in sizes.items():
                quick_size = "16" if name == "quantized" else "4"  # 16: words without codes
                is_quick = dtype == DTYPES[place % len(DTYPES)] and size in (quick_size, "example")
                marks = [] if is_quick else [pytest.mark.slow]
                yield pytest.param(dtype, [*how, *options], id=f"{name}-{dtype}-{size}", marks=marks)


@pytest.mark.parametrize(("dtype", "arguments"), list(runs()))
def test_every_method_and_codec_in_every_dtype(
    dtype: str, arguments: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_small_enough = check_compression(dtype, arguments, tmp_path, capsys)
    assert is_small_enough or arguments[-1] != RATIOS[0]


pytestmark = pytest.mark.usefixtures("short_recovery")


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Lines of ten words, more than are compared."""
    draw = torch.randint(280, (500, 10), generator=torch.Generator().manual_seed(1))
    path = tmp_path / "text"
    path.write_text("".join(" ".join(f"w{word}" for word in line) + "\n" for line in draw.tolist()))
    return path


def recovered(
    folder: Path, words: Path, *arguments: object, method: tuple[Any, ...] = CODES
) -> dict[str, Any]:
    """The report of the command."""
    name, *options = method
    asked = [*options, "--text", words, "--report", folder / "report.json", "--force", *arguments]
    assert compress(folder / "model", name, folder / "small", *asked) == 0
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


@pytest.mark.slow_except("gpt2", "t5")
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "t5", "marian", "encoder"])
def test_the_divergence_falls_for_every_kind(tmp_path: Path, words: Path, kind: str) -> None:
    write(kind, tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    report = recovered(tmp_path, words, "--recover", "8steps")
    trained = report["recovery"]
    # Nearest neighbors of few lines may only stay as near as they are, which the report says.
    is_as_before = any("as before it" in note for note in report["notes"])
    assert trained["kl_after"] < trained["kl_before"] or (kind == "encoder" and is_as_before)
    assert trained["kl_after"] == pytest.approx(report["kept"]["kl"], rel=1e-3)
    assert not any("too few lines" in note for note in report["notes"])


@pytest.mark.slow_except("bf16-codes", "fp16-rank")
@pytest.mark.parametrize(
    "method", [CODES, ("projective", "--rank", 4, "--store", "fp16")], ids=["codes", "rank"]
)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_models_in_16_bits(tmp_path: Path, words: Path, method: tuple[Any, ...], kind: torch.dtype) -> None:
    """What is measured is what the file has: in 16 bits, and with codes as before."""
    build("llama").to(kind).save_pretrained(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    plain = recovered(tmp_path, words, method=method)
    before = load_file(tmp_path / "small" / "model.safetensors")
    trained = recovered(tmp_path, words, "--recover", "8steps", method=method)
    after = load_file(tmp_path / "small" / "model.safetensors")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in before.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in after.items()
    }
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed and any("shared_embeddings" in name for name in changed) == (method is not CODES)
    assert trained["recovery"]["kl_after"] == pytest.approx(trained["kept"]["kl"], rel=1e-3)
    assert trained["kept"]["kl"] < plain["kept"]["kl"]
    assert hf.load(tmp_path / "small").dtype == kind


@pytest.mark.slow_except("bert")
@pytest.mark.parametrize("kind", ["gpt2", "bert"])  # whose output layer has a bias
def test_a_large_vocabulary_is_trained_alike_by_few_words(
    tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Where the few words are all words."""
    write(kind, tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    full = recovered(tmp_path, words, "--recover", "4steps")["recovery"]
    monkeypatch.setattr(session.Session, "words_of", lambda self, *_: every_word(self))
    monkeypatch.setattr(session.Session, "scored_words", None)
    few = recovered(tmp_path, words, "--recover", "4steps")["recovery"]
    assert few["kl_before"] == pytest.approx(full["kl_before"], rel=1e-3)
    assert few["kl_after"] == pytest.approx(full["kl_after"], rel=1e-2)
    assert few["kl_after"] < few["kl_before"]


def test_few_words_of_a_large_vocabulary(
    tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SAMPLED_WORDS", 60)
    monkeypatch.setattr(session, "_FREQUENT", 30)
    write("gpt2", tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    trained = recovered(tmp_path, words, "--recover", "8steps")["recovery"]
    assert trained["kl_after"] < trained["kl_before"]
