"""The contract of counts, of saving and of loading."""

from __future__ import annotations

import copy
import io

import pytest
import safetensors.torch
import torch
from torch import nn

import shared_embeddings as se
from tests.shared_embeddings.cases import VOCABULARY, Case, by_name
from tests.shared_embeddings.contract.checks import all_ids, each_case

# Checkpoints from before every method could have a bias


def test_the_bias_of_the_plain_table_comes_behind_it() -> None:
    """As in the states of optimizers, which number the parameters."""
    emb = by_name("standard-output-bias").build()
    assert [name for name, _ in emb.named_parameters()] == ["weight", "bias"]


def test_the_bias_may_be_among_the_options_of_the_map() -> None:
    case = by_name("define-tied-to-map-output-bias")
    old = {name: value for name, value in case.options.items() if name != "output_bias"}
    emb = case.build(options={**old, "map_options": {"output_bias": True}})
    assert emb.counts() == case.build().counts()
    emb.load_state_dict(case.build(1).state_dict())
    assert emb.stored_options() == case.build().stored_options()
    with pytest.raises(se.OptionError, match="output_bias"):
        case.build(options={**old, "output": "none", "map_options": {"output_bias": True}}, bias=None)


# Counting


@each_case
def test_counts_agree_with_the_tensors_and_with_the_formula(case: Case) -> None:
    emb = case.build()
    counts = emb.counts()
    assert set(counts) == {"input", "output", "shared", "total", "stored_bits"}
    total = sum(parameter.numel() for parameter in {id(p): p for p in emb.parameters()}.values())
    assert counts["total"] == total == se.accounting.count_parameters(emb)
    assert counts["total"] == se.num_parameters(
        case.method,
        num_embeddings=case.num_embeddings,
        embedding_dim=case.embedding_dim,
        **case.options,
    )
    assert all(isinstance(value, int) and value >= 0 for value in counts.values())
    bits = {"fp32": 32, "fp16": 16}[emb.default_store]
    assert counts["stored_bits"] >= bits * total


@each_case
def test_counts_per_side(case: Case) -> None:
    """``shared`` is what both sides use; ``input`` and ``output`` are what one side uses, alone or in all."""
    counts = case.build().counts()
    exclusive = counts["input"] + counts["output"] + counts["shared"]
    inclusive = counts["input"] + counts["output"] - counts["shared"]
    assert counts["total"] in (exclusive, inclusive)
    if not case.output:
        assert counts["output"] == 0


def test_tied_tensors_are_counted_once() -> None:
    emb = by_name("funnel").build()
    both = nn.ModuleDict({"encoder": emb, "decoder": emb})
    both.register_parameter("again", next(iter(emb.parameters())))
    assert se.accounting.count_parameters(both) == emb.counts()["total"]


# Saving and loading


@each_case
def test_state_dict_round_trip(case: Case) -> None:
    first, second = case.build(0), case.build(1)
    assert not torch.equal(first.table(), second.table())
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert torch.equal(first.table(), second.table())
    if case.output:
        assert torch.equal(first.output_table(), second.output_table())


@each_case
def test_state_dict_goes_through_safetensors(case: Case) -> None:
    first, second = case.build(0), case.build(1)
    second.load_state_dict(safetensors.torch.load(safetensors.torch.save(first.state_dict())))
    assert torch.equal(first.table(), second.table())


@each_case
def test_state_dict_is_strict(case: Case) -> None:
    emb = case.build()
    state = emb.state_dict()
    with pytest.raises(RuntimeError, match="nonsense"):
        emb.load_state_dict(state | {"nonsense": torch.zeros(1)})
    missing = next(iter(state))
    with pytest.raises(RuntimeError, match=missing.replace(".", r"\.")):
        emb.load_state_dict({name: value for name, value in state.items() if name != missing})


@each_case
def test_state_dict_of_another_size_is_refused(case: Case) -> None:
    state = case.build(num_embeddings=VOCABULARY + 2).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch"):
        case.build().load_state_dict(state)


@each_case
def test_state_dict_holds_parameters_and_no_cache(case: Case) -> None:
    emb = case.build().eval()
    before = {name: value.shape for name, value in emb.state_dict().items()}
    with torch.no_grad():
        emb(all_ids(case))
        emb.table()
        if case.output:
            emb.log_prob(case.hidden(2))
    assert {name: value.shape for name, value in emb.state_dict().items()} == before


@each_case
def test_deepcopy_is_independent(case: Case) -> None:
    emb = case.build().eval()
    with torch.no_grad():
        expected = emb(all_ids(case)).clone()
    twin = copy.deepcopy(emb)
    with torch.no_grad():
        for parameter in emb.parameters():
            parameter.mul_(2).add_(0.5)
        assert torch.equal(twin(all_ids(case)), expected)
        assert not torch.allclose(emb(all_ids(case)), expected)
    assert twin.counts() == emb.counts()
