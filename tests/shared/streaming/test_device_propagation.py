"""A pass stays on its device: one that refuses to be mixed with the CPU gives the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from shared.budget import measured_runtime_bytes
from shared.kv.paged import BLOCK_TOKENS, SHORT_SEGMENT, PagedKeyValues
from shared.kv.prompt import PromptKeyValues
from shared.model.attention import PART_TOKENS
from shared.model.batch import TokenBatch
from shared.model.layers import KeyValues, LayerWeights
from shared.model.mlp import Linear, Mlp
from shared.model.model import Model, output_matrix
from shared.pack.reader import Pack
from shared.quant import kernels
from shared.quant.arranged import arranged
from shared.quant.candidates import CANDIDATES
from shared.quant.schemes import SCHEMES, scheme_named
from shared.streaming.copies import SynchronousCopies
from shared.streaming.plan import Residency
from shared.tensors import to_bytes
from tests.conftest import FamilyPack, TinyPack
from tests.shared.model.runs import prompt_logits, random_tokens, resident_model
from tests.shared.strict_device import MixedDevicesError, StrictTensor, strict_device

FAMILIES = ["Llama 3.1", "Llama, yarn", "Qwen2, windows in later layers", "Gemma 2", "OLMo 2", "Granite 3"]


def device_model(pack: Pack) -> Model:
    """A model of at least four layers, in all three tiers of the device."""
    layers = pack.spec.layers
    residency = Residency(frozenset({1}), slots=layers - 2, device_slots=2, host=frozenset({2}))
    return Model(pack, residency, copies=SynchronousCopies(strict_device()))


def test_the_device_refuses_what_a_gpu_would_and_computes_what_a_cpu_does() -> None:
    host, first = torch.randn(3, 3), torch.tensor([0])
    ours = host.to(strict_device())
    assert ours.device == strict_device()
    assert torch.equal((ours @ ours + 1).cpu(), host @ host + 1)
    for mixed in (lambda: ours + host, lambda: ours.index_select(0, first), lambda: ours.index_copy_(0, first, ours)):
        with pytest.raises(MixedDevicesError):
            mixed()
    with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
        ours.numpy()


class AsOnDevice:
    """A model on the CPU whose matrices are multiplied by the kernels that devices use, whatever is fastest here."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def walk(self) -> Iterator[tuple[int, LayerWeights]]:
        for layer, weights in self._model.walk():
            assert weights.mlp is not None
            yield (
                layer,
                replace(
                    weights,
                    qkv=as_on_device(weights.qkv),
                    attention_output=as_on_device(weights.attention_output),
                    mlp=Mlp(as_on_device(weights.mlp.gate_up), as_on_device(weights.mlp.down)),
                ),
            )

    def forward(self, batch: TokenBatch, kv: KeyValues) -> Tensor:
        return Model.forward(self, batch, kv)


def as_on_device(matrix: Linear) -> Linear:
    name = matrix.scheme.name
    if name == "fp32" or kernels.PACKED in matrix.components:  # packed weights give the bits of the same kernels
        return matrix
    return replace(matrix, scheme=replace(matrix.scheme, product=CANDIDATES[name][0].product))


def cpu_model(pack: Pack) -> Model:
    """A model on the CPU that multiplies as a device does."""
    if pack.scheme.name == "fp32":
        return resident_model(pack.path)
    outer = pack.read_outer()
    output = Linear(scheme_named("bf16"), {"weight": output_matrix(pack.spec, outer)}, bias=None)
    everything = Residency(frozenset(range(pack.spec.layers)), slots=0)
    return cast(Model, AsOnDevice(Model(pack, everything, outer=outer, output=as_on_device(output))))


@pytest.mark.parametrize("scheme", ["fp32", "bf16", "int8", "nf4"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_prefill_pass_gives_the_logits_of_the_cpu(tiny_pack: TinyPack, scheme: str, tied: bool) -> None:
    pack = Pack.open(tiny_pack(scheme, tied=tied, attention_bias=True, mlp_bias=True))
    prompts = [random_tokens(length, pack.spec.vocab_size, length) for length in (1, 5, 70)]
    expected = torch.cat(prompt_logits(cpu_model(pack), prompts))
    with closing(device_model(pack)) as model:
        for _ in range(2):
            assert torch.equal(torch.cat(prompt_logits(model, prompts)), expected)


@pytest.mark.parametrize("case", FAMILIES)
def test_every_kind_of_model_stays_on_the_device(family_pack: FamilyPack, case: str) -> None:
    pack = Pack.open(family_pack("fp32", case))
    prompts = [random_tokens(length, pack.spec.vocab_size, length) for length in (3, 90)]
    expected = torch.cat(prompt_logits(cpu_model(pack), prompts))
    with closing(device_model(pack)) as model:
        assert torch.equal(torch.cat(prompt_logits(model, prompts)), expected)


@pytest.mark.parametrize("scheme", ["fp32", "int8", "nf4"])
def test_decode_passes_over_received_keys_and_values_give_the_logits_of_the_cpu(
    tiny_pack: TinyPack, scheme: str
) -> None:
    pack = Pack.open(tiny_pack(scheme))
    expected = decoded(cpu_model(pack))
    with closing(device_model(pack)) as model:
        assert torch.equal(decoded(model), expected)


def decoded(model: Model) -> Tensor:
    """Logits of passes over a received prompt, a short one and a long one: the ways in which decode attends."""
    vocab = model.spec.vocab_size
    pool = PagedKeyValues(model.spec, model.dtype, 24, model.device)
    tables = [list(range(start, 24, 3)) for start in range(3)]
    received = random_tokens(20, vocab, 1)
    batch = TokenBatch.of([(received, 0)])
    with torch.inference_mode():
        kv, current = PromptKeyValues(batch.segments), model.begin(batch)
        for layer, weights in model.walk():
            current.compute(layer, weights, kv)
            keys, values = (to_bytes(part) for part in kv.of(batch.segments[0]))
            pool.write(tables[0], layer, 0, keys, values)
        logits = [model.logits(current.last_hidden)]
        lengths = [20, 0, 0]
        for counts in ((1, 3, SHORT_SEGMENT + 8), (5, 1, 2)):
            new = [random_tokens(count, vocab, count) for count in counts]
            batch = TokenBatch.of(zip(new, lengths, strict=True))
            hidden = model.forward(batch, pool.for_pass(batch.segments, tables))
            logits.append(model.logits(hidden[[segment.last_row for segment in batch.segments]]))
            lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
    return torch.cat(logits)


def test_prompts_that_begin_in_blocks_and_are_dropped_on_the_way_stay_on_the_device(tiny_pack: TinyPack) -> None:
    pack = Pack.open(tiny_pack("fp32"))
    expected = reused(cpu_model(pack))
    with closing(device_model(pack)) as model:
        assert torch.equal(reused(model), expected)


def reused(model: Model) -> Tensor:
    """The features of a prompt that reads what another one of the same pass writes; a third one leaves the pass."""
    tokens = random_tokens(3 * BLOCK_TOKENS, model.spec.vocab_size)
    pool = PagedKeyValues(model.spec, model.dtype, 4, model.device)
    tables, common = [[2, 0], [2, 0, 3], []], 2 * BLOCK_TOKENS
    with torch.inference_mode():
        batch = TokenBatch.of(
            [(tokens[: 2 * BLOCK_TOKENS], 0), (tokens[2 * BLOCK_TOKENS :], 2 * BLOCK_TOKENS), ([5], 0)]
        )
        current, kv = model.begin(batch), PromptKeyValues(batch.segments, pool, tables)
        for layer, weights in model.walk():
            if layer == 2:
                current.keep([common, BLOCK_TOKENS, 0])
                kv = PromptKeyValues(current.batch.segments, pool, tables[:2])
            current.compute(layer, weights, kv)
        return current.hidden.cpu()


def test_a_pass_in_parts_stays_on_the_device(tiny_pack: TinyPack) -> None:
    pack = Pack.open(tiny_pack("fp32", context=4096))
    prompt = random_tokens(PART_TOKENS + 100, pack.spec.vocab_size)
    batch = TokenBatch.of([(prompt, 0)])
    results = []
    with closing(device_model(pack)) as model, torch.inference_mode():
        for each in (cpu_model(pack), model):
            hidden = each.forward(batch, PromptKeyValues(batch.segments))
            results.append(each.logits(hidden[-3:]))
    assert torch.equal(*results)


@pytest.mark.parametrize("rows", [1, 2, 16, 33])
@pytest.mark.parametrize("shape", [(64, 128), (96, 1600), (36, 128), (64, 2052)])
def test_integer_products_of_a_device_are_exact_for_every_shape(rows: int, shape: tuple[int, int]) -> None:
    random = torch.Generator().manual_seed(rows)
    codes = torch.randint(-127, 128, (rows, shape[1]), generator=random).to(torch.int8)
    weight = torch.randint(-127, 128, shape, generator=random).to(torch.int8)
    codes[0], weight[0] = 127, 127  # the largest sum
    expected = codes.long() @ weight.t().long()
    found = kernels.device_integer_product(codes.to(strict_device()), weight.to(strict_device()))
    assert isinstance(found, StrictTensor)
    assert torch.equal(found.cpu().long(), expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_products_take_is_measured_on_the_device_itself(scheme: str) -> None:
    assert measured_runtime_bytes([scheme_named(scheme)], strict_device()) > 0


def test_nf4_as_it_is_stored_is_multiplied_right_too() -> None:
    scheme = scheme_named("nf4")
    stored = scheme.fuse([scheme.encode(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)))])
    on_device = {name: tensor.to(strict_device()) for name, tensor in stored.items()}
    found = scheme.product(torch.eye(128, dtype=torch.bfloat16).to(strict_device()), on_device)
    assert torch.equal(found.cpu(), kernels.nf4_dequantize(stored, torch.bfloat16).t())


def test_nf4_is_arranged_in_its_own_memory_and_stands_for_the_same_matrix() -> None:
    scheme = scheme_named("nf4")
    matrix = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    stored = scheme.fuse([scheme.encode(matrix)])
    on_device = {f"qkv.{suffix}": tensor.to(strict_device()) for suffix, tensor in stored.items()}
    tensors, arrange = arranged(on_device | {"norm": torch.ones(3)}, ["qkv", "other"], scheme, strict_device())
    assert sorted(tensors) == ["norm", "qkv.rows", "qkv.rows.absmax"]
    arrange()
    weight = {name.removeprefix("qkv."): tensor for name, tensor in tensors.items() if name != "norm"}
    ones = torch.eye(128, dtype=torch.bfloat16)
    expected = kernels.nf4_dequantize(stored, torch.bfloat16).t()
    assert torch.equal(scheme.product(ones.to(strict_device()), weight).cpu(), expected)
