"""A short measurement of what a handoff takes of the processor: cutting, checksums, messages, gRPC, storing.

A prompt's keys and values are sent through real gRPC from this process to itself, by the functions that both services
call. Processor time of all threads is counted: the loops that move messages run beside arithmetic, and take cores from
it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import torch

from headrace.v1 import prefill_pb2, prefill_pb2_grpc
from shared.kv.handoff import HandoffReceiver, PrefillOutcome, frames_of_layer, tokens_per_frame
from shared.kv.layout import layout_of
from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues
from shared.pack.reader import Pack
from shared.tensors import to_bytes
from shared.wire import frame_from_wire, frame_to_wire, outcome_from_wire, outcome_to_wire

PROMPT_TOKENS = 256
ENOUGH_S = 0.3
"""Of processor time; a prompt at least, after one that warms up."""


def handoff_token_s(pack: Pack) -> float:
    """Processor seconds that each side spends on one prompt token, taken to be half of what both do."""
    return asyncio.run(_both_sides_s(pack)) / 2 / PROMPT_TOKENS


async def _both_sides_s(pack: Pack) -> float:
    """For a prompt."""
    pool = PagedKeyValues(pack.spec, pack.scheme.compute_dtype, PROMPT_TOKENS // BLOCK_TOKENS)
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(_Sender(pack), server)
    port = server.add_insecure_port("localhost:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"localhost:{port}") as channel:
            stub = prefill_pb2_grpc.PrefillServiceStub(channel)
            await _receive(stub, pool, pack)
            started_s, prompts = time.process_time(), 0
            while not prompts or time.process_time() - started_s < ENOUGH_S:
                await _receive(stub, pool, pack)
                prompts += 1
            return (time.process_time() - started_s) / prompts
    finally:
        await server.stop(None)


class _Sender(prefill_pb2_grpc.PrefillServiceServicer):
    """Sends keys and values as a prefill service sends what it has computed."""

    def __init__(self, pack: Pack) -> None:
        shape = (PROMPT_TOKENS, pack.spec.kv_heads, pack.spec.head_dim)
        self._layout = layout_of(pack)
        self._keys, self._values = (torch.zeros(shape, dtype=pack.scheme.compute_dtype) for _ in range(2))

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        frames, step = 0, tokens_per_frame(self._layout)
        for layer in range(self._layout.layers):
            for first in range(0, PROMPT_TOKENS, step):
                part = slice(first, min(first + step, PROMPT_TOKENS))
                keys, values = (to_bytes(tokens[part]) for tokens in (self._keys, self._values))
                for frame in frames_of_layer(self._layout, layer, frames, keys, values, first):
                    frames += 1
                    yield frame_to_wire(frame)
        yield outcome_to_wire(PrefillOutcome(b"", frames, 0.0, 0.0, 1, PROMPT_TOKENS))


async def _receive(stub: Any, pool: PagedKeyValues, pack: Pack) -> None:
    table = range(PROMPT_TOKENS // BLOCK_TOKENS)

    def store(layer: int, first: int, keys: bytes, values: bytes) -> None:
        pool.write(table, layer, first, keys, values)

    receiver = HandoffReceiver(layout_of(pack), PROMPT_TOKENS, store)
    async for response in stub.Prefill(prefill_pb2.PrefillRequest()):
        if response.WhichOneof("event") == "frame":
            receiver.accept(frame_from_wire(response.frame))
        else:
            outcome_from_wire(response.result)
