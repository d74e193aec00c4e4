"""Where what is missing is computed: by length of what is missing, and by whose fault it is missing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
import torch

from decode_service.prefill_client import PrefillClient
from decode_service.prompts import LocalPrefill, Prompts
from decode_service.sequence import Sequence
from decode_service.short_prompts import ShortPrompts
from shared.errors import UnavailableError
from shared.kv.layout import layout_of
from shared.kv.paged import PagedKeyValues
from shared.pack.reader import Pack
from tests.conftest import TinyPack
from tests.decode_service.simulated import sequence_of
from tests.end_to_end.stack import prefill_replica

NOBODY = "127.0.0.1:1"
"""An address that refuses connections."""
SHORT = 8


@pytest.fixture
def pack(tiny_pack: TinyPack) -> Pack:
    return Pack.open(tiny_pack("fp32"))


@pytest.fixture
async def unreachable(pack: Pack) -> AsyncIterator[PrefillClient]:
    client = PrefillClient(
        [NOBODY], model_digest=pack.manifest.model_digest, layout=layout_of(pack), hidden_size=pack.spec.hidden_size
    )
    yield client
    await client.close()


def admitted(prompt_tokens: int, held: int) -> Sequence:
    sequence = sequence_of([5] * prompt_tokens, 4, None, lambda: None)  # type: ignore[arg-type]  # nobody reads
    sequence.blocks, sequence.kv_length = [0, 1, 2, 3], held
    return sequence


class Short(ShortPrompts):
    """Takes up to `SHORT` tokens for short; remembers what it was told of handoffs."""

    def __init__(self) -> None:
        super().__init__(np.zeros_like, lambda: 0, 100, SHORT)
        self.told: list[int] = []

    def handed_off(self, missing: int, elapsed_s: float) -> None:
        assert elapsed_s > 0
        self.told.append(missing)


def prompts(pack: Pack, local: LocalPrefill, client: PrefillClient, short: ShortPrompts | None = None) -> Prompts:
    return Prompts(local, short or Short(), client, PagedKeyValues(pack.spec, torch.float32, 4))


@pytest.mark.parametrize(
    ("local", "prompt_tokens", "held"),
    [
        (LocalPrefill.SHORT, 8, 0),
        (LocalPrefill.SHORT, 40, 32),
        (LocalPrefill.FALLBACK, 40, 32),
        (LocalPrefill.NEVER, 33, 32),
        (LocalPrefill.ALWAYS, 60, 0),
    ],
)
async def test_what_is_short_once_held_tokens_are_taken_off_is_left_to_decodes_passes(
    pack: Pack, unreachable: PrefillClient, local: LocalPrefill, prompt_tokens: int, held: int
) -> None:
    assert await prompts(pack, local, unreachable).compute(admitted(prompt_tokens, held), None) is None


@pytest.mark.parametrize(
    ("local", "prompt_tokens", "held"),
    [(LocalPrefill.SHORT, 9, 0), (LocalPrefill.NEVER, 1, 0), (LocalPrefill.NEVER, 34, 32)],
)
async def test_what_is_not_is_handed_off(
    pack: Pack, unreachable: PrefillClient, local: LocalPrefill, prompt_tokens: int, held: int
) -> None:
    with pytest.raises(UnavailableError):
        await prompts(pack, local, unreachable).compute(admitted(prompt_tokens, held), None)


async def test_a_sequence_that_gave_way_comes_back_even_when_no_replica_answers(
    pack: Pack, unreachable: PrefillClient
) -> None:
    sequence = admitted(34, 16)
    sequence.preemptions = 1
    assert await prompts(pack, LocalPrefill.NEVER, unreachable).compute(sequence, None) is None


async def test_what_a_handoff_took_is_remembered_and_a_failure_is_not(pack: Pack, unreachable: PrefillClient) -> None:
    short = Short()
    with pytest.raises(UnavailableError):
        await prompts(pack, LocalPrefill.NEVER, unreachable, short).compute(admitted(34, 0), None)
    assert short.told == []
    async with prefill_replica(pack.path) as prefill:
        client = PrefillClient(
            [prefill.address],
            model_digest=pack.manifest.model_digest,
            layout=layout_of(pack),
            hidden_size=pack.spec.hidden_size,
        )
        assert await prompts(pack, LocalPrefill.NEVER, client, short).compute(admitted(34, 16), None)
        await client.close()
    assert short.told == [34 - 16]
