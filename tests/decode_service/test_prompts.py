"""Where what is missing is computed: by length of what is missing, and by whose fault it is missing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from decode_service.prefill_client import PrefillClient
from decode_service.prompts import LocalPrefill, Prompts
from decode_service.sequence import Sequence
from shared.errors import UnavailableError
from shared.kv.layout import layout_of
from shared.kv.paged import PagedKeyValues
from shared.pack.reader import Pack
from tests.conftest import TinyPack
from tests.decode_service.simulated import sequence_of

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


def prompts(pack: Pack, local: LocalPrefill, client: PrefillClient) -> Prompts:
    return Prompts(local, SHORT, client, PagedKeyValues(pack.spec, torch.float32, 4))


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
