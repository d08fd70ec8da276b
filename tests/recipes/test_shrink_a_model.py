"""The recipe `shrink_a_model`: its rows, its measures, its table and picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recipes.common.recipe import find_recipe
from recipes.common.results import FILE, read_results, write_result
from recipes.common.tools import run_main
from recipes.shrink_a_model import models, preprocess, summary
from recipes.shrink_a_model.decoder import (
    Predictions,
    cut_windows,
    iq4_nl,
    round_table,
)
from recipes.shrink_a_model.encoder import WORDS, EncoderTexts, agreement, measure, similarities
from recipes.shrink_a_model.models import (
    PICTURE,
    ShrinkRow,
    decoder_table,
    read_grid,
    table,
    write_report,
)
from recipes.shrink_a_model.static import evaluate_static, read_static, static_table
from shared_embeddings.analysis import WordPairs
from shared_embeddings.utils.errors import UserError
from tests.shared_embeddings.hf.models import WORDS as DECODER_WORDS
from tests.shared_embeddings.hf.models import add_tokenizer, build, shrink, write

RECIPE = find_recipe("shrink_a_model")
MARKERS = "<!-- BEGIN results -->\n<!-- END results -->\n"


def test_rows_are_chosen_by_pattern_in_the_order_of_the_file() -> None:
    rows = read_grid(RECIPE)
    assert list(read_grid(RECIPE, ["trimmed", "original"])) == ["original", "trimmed"]
    assert not rows["trimmed"].is_compressed and rows["automatic_8x"].is_compressed
    assert rows["automatic_8x"].ratio == 8 and not rows["automatic_8x"].embedding
    decoders = RECIPE.data_settings()[1]["decoders"]
    for name, row in rows.items():
        assert row.decoder == next((decoder for decoder in decoders if name.startswith(f"{decoder}_")), "")
    assert rows["gemma_spectral_2_recovered"].recover == 20
    with pytest.raises(UserError, match="no row matches 'small'; there are: original, trimmed"):
        read_grid(RECIPE, ["small"])


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("United #39;s airport", "United's airport"),
        ("Hassan:  #39;Abhorrent act #39; says Blair", "Hassan: 'Abhorrent act' says Blair"),
        (" quot;Yes, quot; he printed", '"Yes," he printed'),
        ("#36;10 million  amp; more", "$10 million & more"),
        ("WMC  #151; hostile", "WMC — hostile"),
        ("a second\\team, over \\$54 a barrel", "a second team, over $54 a barrel"),
        ('&lt;A HREF="http://x.y?z=1"&gt;HIG.N&lt;/A&gt; on Tuesday', "HIG.N on Tuesday"),
        ("Campbell Soup Co. (CPB.N: Quote, Profile, Research) on Monday", "Campbell Soup Co. on Monday"),
        ("see http://example.org/a?b for more", "see for more"),
        ("Profits Rise; Shares Fall", "Profits Rise; Shares Fall"),
        ("a race; b", "a race; b"),
    ],
)
def test_markup_of_news_is_removed(raw: str, clean: str) -> None:
    assert preprocess.clean_text(raw) == clean


def test_scores_of_the_original_encoder() -> None:
    draw = np.random.default_rng(0)
    vectors = {name: unit(draw.normal(size=(30, 8))) for name in EncoderTexts.__dataclass_fields__}
    vectors["descriptions"] = vectors["headlines"]
    vectors[WORDS] = np.array([[1, 0], [0.8, 0.6], [0, 1]], dtype=np.float32)
    pairs = [("a", "b", 9.0), ("a", "c", 1.0), ("b", "c", 5.0)]
    scores = measure(vectors, vectors, [WordPairs("set", pairs)])
    assert scores == {"rho": {"set": 1.0}, "found": 1.0, "top1": 1.0, "top10": 1.0, "correlation": 1.0}


def test_agreement_counts_shared_neighbors() -> None:
    cosines = similarities(unit(np.array([[1, 0], [0.9, 0.1], [0, 1], [0.2, 0.8]])))
    other = similarities(unit(np.array([[1, 0], [0, 1], [0.9, 0.1], [0.2, 0.8]])))
    assert agreement(cosines, cosines, 1) == 1
    assert agreement(cosines, other, 1) == 0
    assert agreement(cosines, other, 3) == 1


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length one."""
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_table_and_picture_of_measured_rows(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(MARKERS)
    rows = {name: ShrinkRow(name) for name in ("original", "small", "left")}
    scores = {"found": 0.5, "top1": 0.9, "top10": 0.8, "correlation": 0.99, "speed": 1.0}
    for name, size, onnx in (
        ("original", 800, None),
        ("small", 100, {"bytes": 5e5, "difference": 2e-7, "speed": 1.5}),
    ):
        write_result(
            tmp_path,
            name,
            config={"embedding": {"method": "quantized" if name == "small" else "standard"}},
            counts={"words": 10, "folder_bytes": 3e6, "stored_bits": 8 * size},
            metrics={**scores, "rho": {"EN-RG-65": None}, "onnx": onnx},
            data_checksum="",
        )
    write_report(rows, tmp_path / FILE, readme)
    lines = readme.read_text().splitlines()
    assert lines[3].startswith("| original | plain | 10 | 3.0 | 0.00 | 1.0x | undefined | 50.0 % |")
    assert "| 8.0x |" in lines[4] and lines[4].endswith("| 0.5 | 2e-07 | 1.50x |")
    assert lines[5].startswith("| left | not run |")
    assert (tmp_path / PICTURE).read_bytes().startswith(b"\x89PNG")


def test_readme_table_matches_the_results() -> None:
    records = {
        record["row"]: record for record in map(json.loads, (RECIPE.folder / FILE).read_text().splitlines())
    }
    text = (RECIPE.folder / "README.md").read_text(encoding="utf-8")
    rows = read_grid(RECIPE)
    kinds = {table: "encoder", decoder_table: "decoder", static_table: "static"}
    for made, kind in kinds.items():
        of_kind = {
            name: "decoder" if row.decoder else "static" if row.static else "encoder"
            for name, row in rows.items()
        }
        measured = [records[name] for name in rows if name in records and of_kind[name] == kind]
        lines = {line for line in made(measured).splitlines() if line.startswith("|")}
        assert measured and lines <= set(text.splitlines())


def test_a_model_without_a_configuration_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODEL", str(tmp_path))
    assert run_main("preprocess", lambda arguments: preprocess.main(RECIPE, arguments), []) == 2
    assert f"MODEL={tmp_path}: no config.json there; name the folder of a model" in capsys.readouterr().err


def test_the_table_of_static_models() -> None:
    scores = {"rho": {"EN-RG-65": 0.71}, "found": 0.5, "top1": 0.9, "top10": 0.8, "correlation": 0.99}
    counts = {"stored_bits": 160, "weights": 80}
    done = {"row": "minilm_int8", "config": {}, "counts": counts, "metrics": {**scores, "speed": 1.0}}
    left = {"row": "left", "config": {}, "counts": {}, "metrics": {}}
    titles, _, row, *_, others = static_table([done, left]).splitlines()
    assert titles.startswith("| row | bits a number | weights, MB | rho RG-65 | headlines found |")
    assert row == "| minilm_int8 | 2.00 | 0.00 | 0.710 | 50.0 % | 90.0 % | 80.0 % | 0.9900 | 1.00x |"
    assert others == "Not run: `left`."


def test_a_static_model_is_measured_as_its_own_program_computes(tmp_path: Path) -> None:
    """Speed is relative to what stands for model2vec; rows of the original keep all neighbors."""
    from tests.shared_embeddings.static.models import write_model2vec

    source, prepared = write_model2vec(tmp_path / "data" / "tiny"), tmp_path / "data"
    write_model2vec(tmp_path / "models" / "row")
    lines = {name: [f"w{place} w{place + 1}" for place in range(1, 12)] for name in ("captions", "headlines")}
    (prepared / "texts.json").write_text(json.dumps({**lines, "descriptions": lines["headlines"]}))
    (prepared / "pairs").mkdir()
    (prepared / "pairs" / "EN-TINY.txt").write_text("w1 w2 3\nw1 w5 2\nw3 w9 1\n")
    encoder = read_static(source)
    fake = SimpleNamespace(
        StaticModel=SimpleNamespace(
            from_pretrained=lambda _: SimpleNamespace(encode=lambda lines, **_: encoder.encode(lines))
        )
    )
    path = evaluate_static(tmp_path, "row", "tiny", {}, fake, "")
    (record,) = read_results(path)
    assert record["metrics"]["found"] == record["metrics"]["top10"] == 1
    assert record["counts"]["stored_bits"] == 32 * 60 * 12 and record["metrics"]["speed"] > 0


IQ4_NL_LEVELS = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
WINDOWS = torch.randint(2, DECODER_WORDS, (2, 90), generator=torch.Generator().manual_seed(0))


def write_decoder(folder: Path) -> Path:
    """A tiny random decoder whose tokenizer has a beginning mark."""
    write("gemma3", folder)
    add_tokenizer(folder, bos_token="w299")
    return folder


def test_predictions_of_a_decoder(tmp_path: Path) -> None:
    original, small = write_decoder(tmp_path / "original"), tmp_path / "small"
    compressed = shrink("gemma3", small).eval()
    add_tokenizer(small, bos_token="w299")
    measured = text_of(small, original, WINDOWS)
    with torch.no_grad():
        before, after = (
            model(WINDOWS).logits[:, :-1].log_softmax(-1) for model in (build("gemma3"), compressed)
        )
    wanted = WINDOWS[:, 1:, None]
    assert measured == pytest.approx(
        {
            "perplexity": math.exp(-float(after.gather(2, wanted).mean())),
            "original_perplexity": math.exp(-float(before.gather(2, wanted).mean())),
            "kept": float((before.argmax(-1) == after.argmax(-1)).float().mean()),
        },
        rel=1e-4,
    )
    # Its own predictions are kept.
    measured = text_of(original, original, WINDOWS)
    assert measured["kept"] == 1
    assert measured["perplexity"] == pytest.approx(measured["original_perplexity"], rel=1e-6)


def text_of(folder: Path, original: Path, windows: torch.Tensor) -> dict[str, float]:
    """What is measured of a decoder in the windows of one text."""
    ours, theirs = (Predictions(place.with_suffix(".json"), {}) for place in (folder, original))
    for predictions, place in ((ours, folder), (theirs, original)):
        predictions.add(place, {"text": windows})
    return ours.compare(theirs)["text"]


def test_an_interrupted_measurement_goes_on(tmp_path: Path) -> None:
    original = write_decoder(tmp_path / "original")
    fresh, half = (Predictions(tmp_path / f"{name}.json", {"model": "a"}) for name in ("fresh", "half"))
    half.add(original, {"text": WINDOWS[:1]})
    half = Predictions(half.path, {"model": "a"})
    assert len(half.texts["text"]) == 1
    half.add(original, {"text": WINDOWS})
    fresh.add(original, {"text": WINDOWS})
    assert len(half.texts["text"]) == 2 and half.compare(fresh) == fresh.compare(fresh)
    assert Predictions(half.path, {"model": "b"}).texts == {}


def test_windows_are_spread_over_the_text(tmp_path: Path) -> None:
    tokenizer = preprocess.read_tokenizer(write_decoder(tmp_path))
    text = " ".join(f"w{number}" for number in range(2, 22))
    assert cut_windows(tokenizer, text, 2, 5).tolist() == [[299, 2, 3, 4, 5], [299, 18, 19, 20, 21]]
    assert len(cut_windows(tokenizer, text, 100, 5)) == 5
    with pytest.raises(UserError, match="a text has 20 tokens, but a window takes 29; give a longer text"):
        cut_windows(tokenizer, text, 1, 30)


def test_wikitext_is_written_as_usual() -> None:
    assert (
        preprocess.detokenize("a well @-@ known <unk> of 1 @,@ 000 @.@ 5")
        == "a well-known unknown of 1,000.5"
    )


def test_a_table_in_types_of_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    original = tmp_path / "original"
    kind, config = type(build("gemma3")), build("gemma3").config
    config.hidden_size = 32  # a block of Q8_0, which takes 34 bytes
    model = kind(config)
    model.save_pretrained(original)
    add_tokenizer(original, bos_token="w299")
    report = round_table(original, tmp_path / "rounded", "gguf", "Q8_0")["tables"][0]
    assert report["stored_bytes"]["after"] == 34 * len(model.get_input_embeddings().weight)
    assert 0 < report["fit"]["relative_error"] < 0.01
    measured = text_of(tmp_path / "rounded", original, WINDOWS)
    assert measured["kept"] > 0.9


def test_blocks_of_llama_cpp() -> None:
    levels = torch.tensor(IQ4_NL_LEVELS, dtype=torch.float32)
    exact = torch.cat([levels, levels.flip(0)]) * torch.tensor([[0.5], [-0.25]])
    halves = [place | 15 - place << 4 for place in range(16)]
    blocks = iq4_nl(torch.cat([exact, torch.zeros(1, 32)]))
    assert blocks[:, :2].contiguous().view(torch.half).flatten().tolist() == [0.5, -0.25, 0]
    assert blocks[:, 2:].tolist() == [halves, halves, [8 | 8 << 4] * 16]


def test_gguf_decodes_our_iq4_nl() -> None:
    quants = pytest.importorskip("gguf").quants
    blocks = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    kind = quants.GGMLQuantizationType.IQ4_NL
    decoded = torch.from_numpy(quants.dequantize(iq4_nl(blocks).numpy(), kind))
    assert 0.07 < float((decoded - blocks).norm() / blocks.norm()) < 0.08


def test_calibrated_rows_share_a_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS", str(tmp_path))
    data, asked = RECIPE.data, []
    write_decoder(data / "gemma")
    (data / "calibration.txt").write_text("w1 w2")
    monkeypatch.setattr(models, "get_decoder", lambda name, settings, home: data / name)
    monkeypatch.setattr(models, "write_calibration_text", lambda settings, home: data / "calibration.txt")
    monkeypatch.setattr(models, "write_windows", lambda name, settings, home: None)
    monkeypatch.setattr(
        models, "run_command", lambda name, arguments: asked.append(list(map(str, arguments)))
    )
    measured = str(data / "gemma_calibration.safetensors")
    rows = read_grid(RECIPE)
    for name in ("gemma_int2", "gemma_spectral_2", "gemma_spectral_3_only_text"):
        models.shrink_decoder(RECIPE, rows[name])
    Path(measured).touch()
    for name in ("gemma_spectral_3", "gemma_spectral_2_recovered"):
        models.shrink_decoder(RECIPE, rows[name])
    plain, first, only_text, second, recovered = map(" ".join, asked)
    assert "--calibration none" in plain and "--no-check" in plain
    assert all(f"--calibration {measured}" in command for command in (first, second, recovered))
    assert "--no-check" in first and "--only-text" in only_text and "--only-text" not in first
    assert f"--calibration {data / 'gemma_only_text_calibration.safetensors'}" in only_text
    assert "--recover 20" in recovered and "--no-check" not in recovered


COMPRESSED: dict[str, Any] = {"embedding": {"method": "quantized"}, "calibration": None}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma_original": {**COMPRESSED, "embedding": {"method": "standard"}},
    "gemma_gguf_q4_0": {**COMPRESSED, "peer": {"package": "gguf", "kind": "Q4_0"}},
    "gemma_int4": {**COMPRESSED, "given": {"codec": "uniform", "bits": 4}, "calibration": "none"},
    "smollm_a": {**COMPRESSED, "given": {"codec": "spectral", "bits": 2}},
    "smollm_b": {**COMPRESSED, "given": {"codec": "spectral", "bits": 2}, "only_text": True},
    "smollm_c": {**COMPRESSED, "given": {"codec": "spectral", "bits": 2}, "recover": 20},
}


@pytest.mark.slow
def test_the_picture_of_decoders(tmp_path: Path) -> None:
    text = {"perplexity": 40.0, "original_perplexity": 36.5}
    texts = {"wikitext2": text, "German": {**text, "perplexity": 36.0}, "Python": text}
    counts = {"stored_bits": 160, "weights": 80}
    records: list[dict[str, Any]] = [
        {"row": name, "config": config, "counts": counts, "metrics": {"texts": texts}}
        for name, config in CONFIGS.items()
    ]
    shown = ["", "gguf", "rounded", "default", "only the text", "recovered"]
    assert [models.series(record) for record in records] == shown
    named = [
        "llama.cpp Q4_0, rounded",
        "rounded to 4 bits",
        "--bits 2",
        "--bits 2 --only-text",
        "--bits 2 --recover 20min",
    ]
    assert [models.label(record) for record in records[1:]] == named
    models.draw_decoders([*records, {"row": "left", "config": {}, "metrics": {}}], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_of_decoders_invents_no_numbers() -> None:
    text = {"perplexity": 40.0, "original_perplexity": 36.5, "kl": 0.1, "kept": 0.8}
    counts = {"words": 10, "weights": 80, "folder_bytes": None, "stored_bits": 160}
    texts = {"wikitext2": text, "German": text, "Python": {**text, "perplexity": 80.0}}
    texts["Czech"] = {**text, "perplexity": 41.0}
    original, config = CONFIGS["gemma_original"], CONFIGS["smollm_a"]
    records: list[dict[str, Any]] = [
        {"row": "old", "config": config, "counts": counts, "metrics": {"texts": {"wikitext2": text}}},
        {"row": "new", "config": config, "counts": counts, "metrics": {"texts": texts}},
        {"row": "original", "config": original, "counts": counts, "metrics": {"texts": texts}},
        {"row": "left", "config": config, "counts": counts, "metrics": {}},
    ]
    titles, _, old, new, plain, *_, others = decoder_table(records).splitlines()
    assert titles.endswith("| greedy kept | worst language | WikiText-2 | German | Python | Czech |")
    assert old.startswith("| old | 2.00 | 0.0 | – | 80.0 % | – | +9.6 % | – |")
    assert new.endswith("| Czech +12.3 % | +9.6 % | +9.6 % | +119.2 % | +12.3 % |")
    assert plain.endswith("| – | 40.0 | 40.0 | 80.0 | 41.0 |") and others == "Not run: `left`."


def test_the_front_is_measured(tmp_path: Path) -> None:
    records = {}
    mlx = {"package": "mlx", "kind": "4bit_64"}
    for name, config, perplexities in [
        ("gemma_original", CONFIGS["gemma_original"], [30.0] * 5),
        ("gemma_mlx_4bit_64", {**COMPRESSED, "peer": mlx}, [33.0, 36.0, 36.0, 36.0, 45.0]),
        ("gemma_spectral_4", CONFIGS["smollm_a"], [30.3, 30.6, 30.6, 30.6, 31.5]),
        ("gemma_gguf_iq4_nl", CONFIGS["gemma_gguf_q4_0"], [32.1]),
        (
            "gemma_for_mlx_4_64",
            {**COMPRESSED, "given": {"codec": "affine", "bits": 4}},
            [30.6, 31.2, 31.2, 31.2, 33.0],
        ),
    ]:
        texts = {
            text: {"perplexity": perplexity, "original_perplexity": 30.0}
            for text, perplexity in zip(["wikitext2", "ag_news", "German", "Python", "Czech"], perplexities)
        }
        counts = {"weights": 1_000_000, "folder_bytes_before": 3_200_000, "stored_bits": 4_000_000}
        records[name] = {"row": name, "config": config, "counts": counts, "metrics": {"texts": texts}}
    claim, picture, titles, _, *rows = summary.front(records).replace("\n\n", "\n").splitlines()
    assert "from 3 to 2 MB" in claim and "at most 5.0 %" in claim and claim.endswith("by 7 to 50 %.**")
    assert claim.strip("*") in picture
    assert titles.startswith("| Table | Calibrated | Whole model, MB | WikiText-2 |")
    assert [row.split(" | ")[1] for row in rows] == ["–", "no", "yes", "yes"]  # not those without languages
    assert rows[3].endswith("| 2 | +1.0 % | +2.0 % | +2.0 % | +2.0 % | Czech +5.0 % |")
    assert summary.runtimes(records).splitlines()[2] == (
        "| Gemma 3 270M | MLX `4_64` | 4.00 | 2.0 / 10.0 | 4.0 / 20.0 | 4.0 / 20.0 | 4.0 / 20.0 "
        "| Czech 10.0 / Czech 50.0 |"
    )
    summary.draw_front(records, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_rows_of_decoders_are_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [ShrinkRow("gemma_original", decoder="gemma"), ShrinkRow("gemma_copy", decoder="gemma")]
    for folder in (tmp_path / "data" / "gemma", *(models.model_folder(tmp_path, row.name) for row in rows)):
        write_decoder(folder)
    windows = preprocess.windows_file(tmp_path, "gemma")
    np.savez(windows, wikitext2=WINDOWS.numpy(), ag_news=WINDOWS.numpy())
    for row in rows:
        models.evaluate_decoder(tmp_path, row)
    assert capsys.readouterr().out.count("measuring") == 1  # they are the original
    records = {record["row"]: record for record in read_results(tmp_path)}
    assert set(records) == {row.name for row in rows}
    assert records["gemma_copy"]["metrics"]["texts"]["ag_news"]["kept"] == 1
    models.evaluate_decoder(tmp_path, rows[1])
    assert capsys.readouterr().out == "gemma_copy: up to date\n"
    np.savez(windows, wikitext2=WINDOWS[:1].numpy(), ag_news=WINDOWS.numpy())
    models.evaluate_decoder(tmp_path, rows[0])
    assert "measuring" in capsys.readouterr().out
