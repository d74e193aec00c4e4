"""The tiers on a real CUDA device: the CPU's logits within rounding, the same bits from every tier, the budget kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from torch import Tensor

from shared.budget import measured_runtime_bytes
from shared.card import CONTEXT_BYTES, Card, open_card
from shared.demand import DecodeSettings
from shared.device_demand import decode_tiers
from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues
from shared.model.batch import TokenBatch
from shared.model.model import Model
from shared.pack.reader import Pack
from shared.quant import kernels
from shared.streaming.plan import Residency
from tests.conftest import TinyPack
from tests.shared.model.runs import prompt_logits, random_tokens
from tests.shared.streaming.test_device_propagation import cpu_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

LAYERS = 6
SCHEMES = ["fp32", "bf16", "int8", "nf4"]
TOLERANCE = {"fp32": 1e-5, "bf16": 0.02, "int8": 0.02, "nf4": 0.02}
"""Mean difference between two logits ÷ largest logit: rounding, which random layers amplify."""
PLACEMENTS = [
    Residency(frozenset(range(LAYERS)), 0),
    Residency(frozenset(), 2, device_slots=2),
    Residency(frozenset({1}), 2, device_slots=3, host=frozenset({0, 4})),
    Residency(frozenset(), 0, device_slots=2, host=frozenset(range(LAYERS))),
]


@pytest.fixture(scope="module")
def card() -> Iterator[Card]:
    card = open_card("cuda", "50%")
    assert card is not None
    with closing(card.copies):
        yield card


def on_card(pack: Pack, residency: Residency, card: Card, prompts: list[list[int]]) -> list[Tensor]:
    """Logits of two passes."""
    with closing(Model(pack, residency, copies=card.copies)) as model:
        return [torch.cat(prompt_logits(model, prompts)) for _ in range(2)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_cpu_and_the_same_bits_from_every_tier(
    tiny_pack: TinyPack, card: Card, scheme: str, tied: bool
) -> None:
    pack = Pack.open(tiny_pack(scheme, layers=LAYERS, tied=tied, attention_bias=True, hidden=256, intermediate=512))
    prompts = [random_tokens(length, pack.spec.vocab_size, length) for length in (1, 5, 300)]
    expected = torch.cat(prompt_logits(cpu_model(pack), prompts))
    found = [logits for residency in PLACEMENTS for logits in on_card(pack, residency, card, prompts)]
    assert (found[0] - expected).abs().mean() <= TOLERANCE[scheme] * expected.abs().max()
    assert all(torch.equal(logits, found[0]) for logits in found)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 256])
@pytest.mark.parametrize("shape", [(64, 128), (96, 1600), (36, 128), (64, 2052)])
def test_integer_products_are_exact(card: Card, rows: int, shape: tuple[int, int]) -> None:
    random = torch.Generator().manual_seed(rows)
    codes = torch.randint(-127, 128, (rows, shape[1]), generator=random).to(torch.int8)
    weight = torch.randint(-127, 128, shape, generator=random).to(torch.int8)
    codes[0], weight[0] = 127, 127
    found = kernels.device_integer_product(codes.to(card.device), weight.to(card.device))
    assert torch.equal(found.cpu().long(), codes.long() @ weight.t().long())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_device_budget_holds_through_passes_that_fill_it(tiny_pack: TinyPack, card: Card, scheme: str) -> None:
    shape = {"hidden": 1024, "intermediate": 4096, "layers": 12, "heads": 16, "vocab": 4096, "context": 1024}
    pack = Pack.open(tiny_pack(scheme, **shape))
    settings = DecodeSettings(context_length=1024, batch=8, draft_length=4, receives=True, prompt_tokens=256)
    runtime_bytes = measured_runtime_bytes([pack.scheme], card.device)
    demand = decode_tiers(pack, None, settings, runtime_bytes, card.runtime_bytes())
    small = Card(card.copies, demand.device.smallest_budget_bytes)
    plan = small.plan(8 << 30, demand)
    assert len(plan.residency.resident) < LAYERS, "the smallest budget leaves layers to the host"
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(card.device)
    try:
        with closing(Model(pack, plan.residency, copies=card.copies)) as model, torch.inference_mode():
            pool = PagedKeyValues(pack.spec, model.dtype, plan.kv_blocks, card.device)
            table = list(range(min(plan.kv_blocks, 1024 // BLOCK_TOKENS)))
            known, tokens = 0, len(table) * BLOCK_TOKENS
            while known < tokens:
                new = random_tokens(min(256, tokens - known), pack.spec.vocab_size)
                batch = TokenBatch.of([(new, known)])
                hidden = model.forward(batch, pool.for_pass(batch.segments, [table]))
                assert torch.isfinite(model.logits(hidden[-settings.scored_rows :])).all()
                known += len(new)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, card.device)
    assert torch.cuda.max_memory_allocated(card.device) <= small.budget_bytes - CONTEXT_BYTES
    assert torch.cuda.max_memory_reserved(card.device) <= small.budget_bytes - CONTEXT_BYTES
