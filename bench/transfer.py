"""A handoff with nothing to compute: keys and values from tensors to blocks, between two processes.

    python -m bench.transfer PACK          (the sender alone; `bench.prefill` starts it)

The sender answers `Prefill` with random keys and values of the prompt's length, cut, summed and sent by the functions
of the prefill service; the receiver checks and stores them by those of decode. What lies between, gRPC and the sockets
of this machine, is the limit: the same bytes in ready-made messages that nobody looks into.
"""

from __future__ import annotations

from shared.allocator import share_one_heap
from shared.threads import wait_passively

share_one_heap()
wait_passively()

import argparse  # noqa: E402  torch is loaded below, after the lines above
import asyncio  # noqa: E402
import contextlib  # noqa: E402
import json  # noqa: E402
import signal  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import AsyncIterator, Callable  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import grpc  # noqa: E402
import torch  # noqa: E402

from bench.services import Started, service  # noqa: E402
from headrace.v1 import prefill_pb2, prefill_pb2_grpc  # noqa: E402
from shared.config import CHANNEL_OPTIONS  # noqa: E402
from shared.kv.handoff import (  # noqa: E402
    Frame,
    HandoffReceiver,
    KvLayout,
    PrefillOutcome,
    frames_of_layer,
    tokens_per_frame,
)
from shared.kv.layout import layout_of  # noqa: E402
from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues  # noqa: E402
from shared.pack.reader import Pack  # noqa: E402
from shared.tensors import to_bytes  # noqa: E402
from shared.wire import frame_from_wire, frame_to_wire, outcome_to_wire  # noqa: E402

LEAST_BYTES = 256 << 20
"""Sent in a round at least: the kernel counts processor time in hundredths of seconds."""


@dataclass(frozen=True)
class Transfer:
    """Prompts of one length, handed over one after another: medians over the rounds."""

    tokens: int
    prompt_bytes: int
    wall_ms: float
    """Of one prompt."""
    sender_s_per_gb: float
    """Processor seconds ÷ 10⁹ bytes of keys and values."""
    receiver_s_per_gb: float
    bare_sender_s_per_gb: float
    """The same for ready-made messages that nobody looks into."""
    bare_receiver_s_per_gb: float


def transfers(pack_path: str, lengths: list[int], rounds: int) -> list[Transfer]:
    """Hands prompts of several lengths over."""
    with service("bench.transfer", pack_path, "0") as sender:
        return [asyncio.run(_transfer(sender, Pack.open(Path(pack_path)), tokens, rounds)) for tokens in lengths]


async def _transfer(sender: Started, pack: Pack, tokens: int, rounds: int) -> Transfer:
    layout = layout_of(pack)
    prompt_bytes = 2 * layout.layers * layout.token_bytes * tokens
    times = -(-LEAST_BYTES // prompt_bytes)
    blocks = -(-tokens // BLOCK_TOKENS)
    pool, table = PagedKeyValues(pack.spec, pack.scheme.compute_dtype, blocks), range(blocks)

    async with grpc.aio.insecure_channel(sender.address, options=CHANNEL_OPTIONS) as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        send_bare = channel.unary_stream(BARE_METHOD, request_serializer=None, response_deserializer=None)

        async def receive() -> None:
            receiver = HandoffReceiver(layout, tokens, lambda *arguments: pool.write(table, *arguments))
            async for response in stub.Prefill(prefill_pb2.PrefillRequest(token_ids=[0] * tokens)):
                if response.WhichOneof("event") == "frame":
                    receiver.accept(frame_from_wire(response.frame))

        async def receive_bare() -> None:
            async for _ in send_bare(str(prompt_bytes).encode()):
                pass

        await receive()
        await receive_bare()
        found = []
        for _ in range(rounds):
            whole = await _timed(receive, times, sender)
            found.append((*whole, *await _timed(receive_bare, times, sender)))
    wall_s, *seconds = (statistics.median(column) for column in zip(*found, strict=True))
    del seconds[2]  # the time of the bare messages
    sender_s, receiver_s, bare_sender_s, bare_receiver_s = (each / prompt_bytes * 1e9 for each in seconds)
    return Transfer(tokens, prompt_bytes, wall_s * 1e3, sender_s, receiver_s, bare_sender_s, bare_receiver_s)


async def _timed(work: Callable[[], Any], times: int, sender: Started) -> tuple[float, float, float]:
    """Seconds of one of so many runs: that passed, and of the sender's and the receiver's processor."""
    started_s, sent_s, received_s = time.perf_counter(), sender.processor_s, time.process_time()
    for _ in range(times):
        await work()
    spent = time.perf_counter() - started_s, sender.processor_s - sent_s, time.process_time() - received_s
    return spent[0] / times, spent[1] / times, spent[2] / times


BARE_METHOD = "/bench.Bare/Send"


class _Sender(prefill_pb2_grpc.PrefillServiceServicer):
    """Sends random keys and values as a prefill service sends what it has computed."""

    def __init__(self, layout: KvLayout, dtype: torch.dtype, longest: int) -> None:
        self._layout = layout
        shape = (longest, layout.kv_heads, layout.head_dim)
        self._keys, self._values = (torch.randn(shape).to(dtype) for _ in range(2))

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[Any]:  # noqa: N802  gRPC names it
        """As `prefill_service.engine` and `servicer`."""
        tokens, step, frames = len(request.token_ids), tokens_per_frame(self._layout), 0
        for layer in range(self._layout.layers):
            for first in range(0, tokens, step):
                part = slice(first, min(first + step, tokens))
                keys, values = to_bytes(self._keys[part]), to_bytes(self._values[part])
                for frame in frames_of_layer(self._layout, layer, frames, keys, values, first):
                    yield frame_to_wire(frame)
                    frames += 1
        yield outcome_to_wire(PrefillOutcome(b"", frames, 0, 0, 1, tokens))

    async def send_bare(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """So many bytes in messages as large as a frame's."""
        step = tokens_per_frame(self._layout)
        half = to_bytes(self._keys[:step])
        message = frame_to_wire(Frame(0, 0, 0, step, half, half, 0)).SerializeToString()
        for _ in range(-(-int(request) // len(message))):
            yield message


async def _serve(pack: Pack) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    sender = _Sender(layout_of(pack), pack.scheme.compute_dtype, pack.spec.context_length)
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(sender, server)
    service_name, method = BARE_METHOD[1:].split("/")
    handler = grpc.unary_stream_rpc_method_handler(sender.send_bare)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
    await stopped.wait()
    await server.stop(None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(Pack.open(parser.parse_known_args()[0].pack)))
