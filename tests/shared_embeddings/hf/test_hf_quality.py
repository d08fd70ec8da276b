"""The quality of compressed models: perplexity, predictions, and their storage."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from shared_embeddings import hf
from shared_embeddings.compress import search, session
from shared_embeddings.compress.calibration import Calibration, calibrate
from shared_embeddings.hf.adapter import FolderModel
from shared_embeddings.hf.quality import computing, negative_log_likelihoods, samples
from shared_embeddings.quant.storage import HEADER
from tests.helpers import best_words, main
from tests.shared_embeddings.hf.models import DIM, KINDS, WORDS, add_tokenizer, build, compress, scores, write


def measured(model: Any, ids: list[int]) -> float:
    """The perplexity in one window."""
    with torch.no_grad():
        loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([ids])).loss
    return math.exp(float(loss))


def test_perplexity_before_and_after(tmp_path: Path) -> None:
    model = write("gpt2", tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    ids = random.Random(1).choices(range(WORDS), k=80)
    text, report = tmp_path / "text", tmp_path / "report.json"
    text.write_text(" ".join(f"w{number}" for number in ids))
    asked = ["--rank", 4, "--store", "int8", "--validation", text, "--report", report]
    assert compress(tmp_path / "model", "projective", tmp_path / "small", *asked) == 0
    quality = json.loads(report.read_text())["quality"]
    assert quality["before"] == pytest.approx(measured(model, ids), rel=1e-5)
    assert quality["after"] == pytest.approx(measured(hf.load(tmp_path / "small"), ids), rel=1e-4)
    assert quality["before"] != pytest.approx(quality["after"], rel=1e-3)


def test_windows_score_every_token_once() -> None:
    """A model with a context of one token has the same perplexity in any window."""
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(2))

    class Bigrams:
        def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
            return transformers.modeling_outputs.CausalLMOutput(logits=table[input_ids])

    ids = random.Random(3).choices(range(9), k=23)
    logs = table.log_softmax(dim=1)
    wanted = -sum(float(logs[a, b]) for a, b in zip(ids, ids[1:]))
    for window in (2, 3, 6, 7, 23, 50):
        losses = negative_log_likelihoods(Bigrams(), [], ids, window)
        assert losses.shape == (22,) and float(losses.sum()) == pytest.approx(wanted)
    first = -float(logs[4, ids[0]])
    losses = negative_log_likelihoods(Bigrams(), [4], ids, 50)
    assert losses.shape == (23,) and float(losses.sum()) == pytest.approx(wanted + first)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_models_without_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    write(kind, tmp_path / "model")
    (tmp_path / "text").write_text("w1 w2\n")
    asked = ["--rank", 4, "--validation", tmp_path / "text"]
    capsys.readouterr()
    assert compress(tmp_path / "model", "projective", tmp_path / "small", *asked) == 2
    line = capsys.readouterr().err
    assert "has no perplexity" in line and line.count("\n") == 1
    assert not (tmp_path / "small").exists()


def test_position_ids_after_the_padding(tmp_path: Path) -> None:
    """Of 24 positions RoBERTa has 22 for tokens, since it counts from the id of padding, which is 1."""
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.XLMRobertaConfig(
        vocab_size=WORDS, max_position_embeddings=24, is_decoder=True, pad_token_id=1, **settings
    )
    transformers.XLMRobertaForCausalLM(config).save_pretrained(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    text, report = tmp_path / "text", tmp_path / "report.json"
    text.write_text(" ".join(f"w{number}" for number in random.Random(1).choices(range(2, WORDS), k=80)))
    asked = ["--validation", text, "--report", report]
    assert compress(tmp_path / "model", "standard", tmp_path / "small", *asked) == 0
    quality = json.loads(report.read_text())["quality"]
    assert quality["after"] == pytest.approx(quality["before"], rel=1e-6)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Five lines of ten words."""
    draw = random.Random(1)
    lines = [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(10)) for _ in range(5)]
    (tmp_path / "text").write_text("\n".join(lines) + "\n")
    return tmp_path / "text"


def kept(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, dict[str, Any]]:
    """The last line, and its part of the report."""
    report = folder / "report.json"
    capsys.readouterr()
    asked = [*arguments, "--report", report, "--force"]
    assert compress(folder / "model", "projective", folder / "small", *asked) == 0
    return capsys.readouterr().out.splitlines()[-1], json.loads(report.read_text())["kept"]


@pytest.mark.slow_except("bert")
@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_repeatable_for_every_kind(tmp_path: Path, kind: str) -> None:
    write(kind, tmp_path / "model")
    model = FolderModel(tmp_path / "model")
    first, again = model.samples(None, 1, 1000), model.samples(None, 1, 1000)
    assert first.how == again.how
    predictions = [best_words(samples) for samples in (first, first, again)]
    assert all(torch.equal(words, predictions[0]) for words in predictions) and len(predictions[0]) >= 900


@pytest.mark.slow_except("bert", "t5")
@pytest.mark.parametrize("kind", ["encoder", *sorted(KINDS.keys() - {"qwen2"})])  # whose tokenizer has more
def test_models_of_every_kind_are_calibrated(tmp_path: Path, words: Path, kind: str) -> None:
    """Without hooks that stay; an input table and an output layer have each its own metric."""
    write(kind, tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    model = FolderModel(tmp_path / "model")
    for texts in ([words], None):
        calibrations = calibrate(model, model.tables(), texts, 1, progress=False)
        assert calibrations.keys() == {table.name for table in model.tables()}
        for name, (metric, shares) in calibrations.items():
            assert bool(metric.isfinite().all()) and float(metric.trace()) > 0
            is_scored = next(table.is_scored for table in model.tables() if table.name == name)
            assert bool((shares > 0).all()) == is_scored and float(shares.sum()) <= 1 + 1e-4
    samples = model.samples([words], 1, 100)
    lookups = [module for modules in samples.lookups.values() for module in modules]
    output = model.module.get_output_embeddings()
    assert not any(
        layer._forward_hooks or layer._forward_pre_hooks for layer in [*lookups, output] if layer is not None
    )


def hashed_rows(kind: str, model: Any, ids: list[int]) -> dict[str, list[int]]:
    """The rows that a model reads with ids, by table, in whole numbers of Python."""

    def wrapped(number: int) -> int:
        return (number + 2**63) % 2**64 - 2**63

    if kind == "BltForCausalLM":  # a polynomial of so many bytes, and a part of the table for each
        windows = [(size, [0] * (size - 1) + ids) for size in (2, 3)]
        hashes = [
            wrapped(sum(word * (10**9 + 7) ** power for power, word in enumerate(read[place : place + size])))
            % 170
            + 170 * number
            for number, (size, read) in enumerate(windows)
            for place in range(len(ids))
        ]
        return {"ngrams": hashes}
    rows: dict[str, list[int]] = {}
    end = 1  # before which nothing is seen
    for layer in (0, 1):
        table, read = model.model.layers[layer].ple.ple_embedding, [end, end, *ids]
        factors = table.layer_multipliers.tolist()
        rows[f"ngrams_{layer}"] = []
        for place, head in itertools.product(range(2, len(read)), range(4)):
            mixed = read[place] * factors[0]
            for back in range(1, 2 + head // 2):
                is_seen = end not in read[place - back : place]
                mixed ^= (read[place - back] if is_seen else end) * factors[back]
            row = wrapped(mixed) % table.head_vocab_sizes[head] + table.head_offsets[head]
            rows[f"ngrams_{layer}"].append(row)
    return rows


@pytest.mark.parametrize("kind", ["BltForCausalLM", "Qwen4ExpForCausalLM"])
def test_look_ups_of_hashed_rows_are_counted(tmp_path: Path, words: Path, kind: str) -> None:
    """In all of a text, and in calibration; without hooks that stay."""
    write(kind, tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    model = FolderModel(tmp_path / "model")
    inputs = {}
    hook = model.module.get_input_embeddings().register_forward_pre_hook(
        lambda _, ids: inputs.update({len(inputs): ids[0]})
    )
    with hook:
        counts = model.count_rows([words], 1)
    texts = [row for ids in inputs.values() for row in ids.tolist()]
    assert sum(map(len, texts)) == 50
    wanted = {name: torch.zeros(len(count)) for name, count in counts.items()}
    for ids in texts:
        for name, rows in hashed_rows(kind, model.module, ids).items():
            wanted[name] += torch.tensor(rows).bincount(minlength=len(wanted[name]))
    assert all(torch.equal(counts[name], wanted[name]) for name in wanted) and wanted
    calibrations = calibrate(model, model.tables(), [words], 1, progress=False)
    for name, count in counts.items():
        torch.testing.assert_close(calibrations[name].shares, count / count.sum())
        assert float(calibrations[name].metric.trace()) > 0
    assert not any(layer._forward_hooks for layer in model.module.modules())


def test_the_best_candidate_is_tried_without_calibration(
    tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless predictions stay; what is better is written."""
    write("gpt2", tmp_path / "model")
    add_tokenizer(tmp_path / "model")

    def useless(model: Any, tables: Any, *_: Any) -> dict[str, Calibration]:
        """A metric in which one direction counts, and words count in no sensible way."""
        metric = torch.zeros(DIM, DIM)
        metric[0, 0] = 1.0
        return {table.name: Calibration(metric, torch.arange(WORDS) / WORDS**2) for table in tables}

    monkeypatch.setattr(session, "calibrate", useless)
    asked = ["compress", "--model", tmp_path / "model", "--text", words, "--bits", 4, "--output"]
    assert main([str(argument) for argument in [*asked, tmp_path / "similar"]]) == 0
    assert "not calibrated" not in capsys.readouterr().out
    monkeypatch.setattr(search, "SMALL_KL", 0.0)
    assert main([str(argument) for argument in [*asked, tmp_path / "small"]]) == 0
    trials, _, rest = capsys.readouterr().out.partition("\n\n")
    first, *others = trials.splitlines()[2:]
    assert ", not calibrated" in first and not any("not calibrated" in other for other in others)
    assert "rounded for predictions" not in rest


@pytest.mark.parametrize("kind", ["gemma3", "t5"])
def test_candidates_for_a_large_vocabulary_are_compared_on_a_sample_of_words(
    tmp_path: Path,
    words: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """The one that is best is then fitted to all words; the model that is written is whole."""
    write(kind, tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    asked = ["compress", "--model", tmp_path / "model", "--text", words, "--size", "4x"]
    monkeypatch.setattr(session, "SAMPLED_WORDS", 60)
    monkeypatch.setattr(session, "_FREQUENT", 30)
    report = tmp_path / "report.json"
    sampled = [*asked, "--output", tmp_path / "small", "--report", report]
    assert main([str(argument) for argument in sampled]) == 0
    printed = capsys.readouterr().out
    assert printed.count("{method: quantized") >= 3 and "at other sizes" not in printed
    small = hf.load(tmp_path / "small")
    assert scores(small).shape[-1] == WORDS
    kept = json.loads(report.read_text())["kept"]
    assert kept["share"] > 0.5 and "tokens that stand for all" in kept["how"]
    # The row of the best one and the last lines are of the same measurement.
    table, _, report_of_it = printed.partition("weights of")
    last = report_of_it.splitlines()[-1]
    best = next(line for line in table.splitlines() if line.startswith("{method"))
    assert f"  {kept['kl']:.4f}  " in best and "tokens are too few to judge" in report_of_it
    if kind == "gemma3":
        text = kept["perplexity"]
        assert f"perplexity {text['after']:.2f}, {text['before']:.2f} before (" in last
        assert f"  {text['after']:.2f} ({last.split(' before (')[1].split(')')[0]})" in best
        assert kept["languages"] and f"the worst of {len(kept['languages'])} languages" in report_of_it
    else:
        assert kept["perplexity"] is None and not kept["languages"]


def test_models_compute_in_float32_where_the_cpu_has_no_other_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write("gemma3", tmp_path / "model").bfloat16()
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    before = dict(model.named_parameters(remove_duplicate=False))
    with computing(model):
        inside = dict(model.named_parameters(remove_duplicate=False))
        assert all(tensor.dtype == torch.float32 for tensor in inside.values())
        assert inside["lm_head.weight"] is inside["model.embed_tokens.weight"]
        assert model(input_ids=torch.tensor([[1, 2]])).logits.dtype == torch.float32
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is tensor and tensor.dtype == torch.bfloat16 for name, tensor in before.items())


@torch.no_grad()
def test_agreement_compares_next_tokens(
    tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one line of 20 tokens."""
    before = write("gpt2", tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    ids = random.Random(4).choices(range(WORDS), k=20)
    words.write_text(" ".join(f"w{number}" for number in ids))
    _, retention = kept(tmp_path, capsys, "--rank", 6, "--text", words)
    first, second = (
        model(input_ids=torch.tensor([ids])).logits[0, :-1].softmax(dim=-1).max(dim=-1)
        for model in (before, hf.load(tmp_path / "small"))
    )
    wanted = first.values[first.indices == second.indices].sum() / first.values.sum()
    assert 0 < retention["share"] < 1 and retention["share"] == pytest.approx(float(wanted), abs=1e-5)


def test_generated_answers_are_greedy_and_end_at_eos(tmp_path: Path, words: Path) -> None:
    """The predictions of a translator after every word of its output are that output."""
    model = write("marian", tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    words.write_text("w5 w9 w2\n")
    predictions = best_words(FolderModel(tmp_path / "model").samples([words], 1, 1000)).tolist()
    ids = torch.tensor([[5, 9, 2]])
    output_of = model.generate(ids, do_sample=False, num_beams=1, max_new_tokens=9)[0].tolist()[1:]
    end = output_of.index(1) + 1 if 1 in output_of else len(output_of)
    # The last token is fixed if it is forced to be the end-of-sequence token.
    assert predictions[: end - 1] == output_of[: end - 1] and len(predictions) == end


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("BertForPreTraining", KINDS["bert"][1]),
        ("XLNetLMHeadModel", {"vocab_size": WORDS, "d_model": DIM, "n_layer": 1, "n_head": 2, "d_head": 8}),
    ],
)
def test_classes_with_other_names_are_calibrated(
    tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str], name: str, settings: dict[str, Any]
) -> None:
    """The scores of words have one; the number of positions of XLNet is -1."""
    chosen = getattr(transformers, name)
    chosen(chosen.config_class(**settings)).save_pretrained(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    asked = ["--bits", 4, "--text", words]
    assert compress(tmp_path / "model", "quantized", tmp_path / "small", *asked) == 0
    printed = capsys.readouterr().out
    assert "of the predictions of the original" in printed and "is rounded for predictions" in printed


def test_models_that_cannot_be_calibrated(
    tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build("bart")
    transformers.BartForSequenceClassification(model.config).save_pretrained(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    asked = ["--bits", 4, "--text", words]
    assert compress(tmp_path / "model", "quantized", tmp_path / "small", *asked) == 2
    assert "cannot be probed" in (line := capsys.readouterr().err) and "give calibration 'none'" in line
    assert compress(tmp_path / "model", "quantized", tmp_path / "small", *asked, "--calibration", "none") == 0


def test_masked_words_are_predicted_with_a_mask_token(tmp_path: Path, words: Path) -> None:
    model = write("bert", tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    vocabulary = FolderModel(tmp_path / "model").vocabulary
    vocabulary.tokenizer.mask_token = "w7"
    asked = samples(model, vocabulary, [words], 1, 1000)
    number = int(asked.how.split()[0])
    assert 1 <= number < 30 and asked.how == f"{number} tokens masked of text"
    assert len(best_words(asked)) == number


# Kind, method with its options, storage, and the type that a tensor of words has on the disk.
STORED = [
    ("gemma", ["projective", "--rank", 4], "int8", torch.int8),
    ("t5_untied", ["projective", "--rank", 4], "fp16", torch.float16),
    ("marian", ["compositional_code", "--num-codebooks", 4, "--codebook-size", 8], "fp32", torch.uint8),
]


def tensor_bytes(file: Path) -> int:
    """The bytes of a safetensors file without its header."""
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")


@pytest.mark.slow_except("gemma-method0-int8-stored_type0")
@pytest.mark.parametrize(("kind", "method", "store", "stored_type"), STORED)
def test_packed_on_disk(
    tmp_path: Path, kind: str, method: list[Any], store: str, stored_type: torch.dtype
) -> None:
    write(kind, tmp_path / "model")
    small, report_file = tmp_path / "small", tmp_path / "report.json"
    asked = [*method[1:], "--store", store, "--fit-steps", 5, "--report", report_file]
    assert compress(tmp_path / "model", method[0], small, *asked) == 0
    state = load_file(small / "model.safetensors")
    assert HEADER in state
    assert stored_type in {t.dtype for name, t in state.items() if name.startswith("shared_embeddings.")}
    weights = json.loads(report_file.read_text())["bytes_of_weights"]["after"]
    assert abs(tensor_bytes(small / "model.safetensors") - weights) < 0.02 * weights
    wanted = scores(hf.load(small))
    # Saving again gives the same bytes, unless the model was loaded for training.
    for trainable in (False, True):
        again, opened = tmp_path / f"again_{trainable}", hf.load(small, trainable=trainable)
        is_plain = trainable or store == "fp32"
        assert all(parameter.requires_grad for parameter in opened.shared_embeddings.parameters()) == is_plain
        opened.save_pretrained(again)
        saved = load_file(again / "model.safetensors")
        assert (HEADER not in saved) == is_plain
        assert is_plain or saved.keys() == state.keys()
        assert is_plain or all(torch.equal(saved[name], tensor) for name, tensor in state.items())
        torch.testing.assert_close(scores(hf.load(again)), wanted, rtol=1e-5, atol=1e-6)


def test_models_in_16_bits(tmp_path: Path) -> None:
    model = build("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    assert compress(tmp_path / "model", "standard", tmp_path / "same") == 0
    same = hf.load(tmp_path / "same")
    assert {parameter.dtype for parameter in same.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(scores(same), scores(model))
    asked = ["--size", "4x", "--report", tmp_path / "report.json"]
    assert compress(tmp_path / "model", "projective", tmp_path / "small", *asked) == 0
    for table in json.loads((tmp_path / "report.json").read_text())["tables"]:
        before = 2 * WORDS * DIM
        # A rank more would be (300 + 16) * 4 numbers, and 2,528 bytes.
        assert table["stored_bytes"] == {"before": before, "after": 2 * (WORDS + DIM) * 3}


def test_a_model_that_is_not_run_is_not_calibrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a text; its tokens get bits by the words of languages all the same."""
    write("gpt2", tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    assert compress(tmp_path / "model", "quantized", tmp_path / "small", "--bits", 3, "--no-check") == 0
    assert "codes are not calibrated" in capsys.readouterr().out
