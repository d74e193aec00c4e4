"""Both services inside the test's process: the real parts on loopback, at sizes that a test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from decode_service.drafts import build_drafts
from decode_service.engine import DecodeEngine
from decode_service.prefill_client import PrefillClient
from decode_service.prompts import LocalPrefill, Prompts
from decode_service.requests import RequestReader
from decode_service.scheduler import DecodeScheduler
from decode_service.scoring import Scoring
from decode_service.servicer import DecodeServicer
from decode_service.short_prompts import ShortPrompts
from decode_service.speculation.controller import DraftController
from decode_service.speculation.proposer import Proposer
from decode_service.tables import BlockTables
from decode_service.text.tokenizer import Tokenizer
from headrace.client import AsyncClient
from headrace.retry import RetryPolicy
from headrace.types import Completion
from headrace.v1 import decode_pb2_grpc, prefill_pb2_grpc
from prefill_service.engine import PrefillEngine
from prefill_service.prompt_cache import PromptCache
from prefill_service.scheduler import PromptScheduler
from prefill_service.servicer import PrefillServicer
from shared.blocks import BlockPool
from shared.config import Address
from shared.draft_pack import DraftPack
from shared.kv.layout import layout_of
from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues
from shared.limits import LONGEST_DRAFT
from shared.metrics import Gauges, Identity, Telemetry
from shared.model.model import Model
from shared.pack.reader import Pack
from shared.server import ANY_LOOPBACK_PORT, RunningServer, ServerOptions, Service, TlsFiles, serving
from shared.spool import Spool
from shared.spool_file import SpoolFolder
from shared.streaming.copies import Copies
from shared.streaming.plan import Residency

ONE_TRY = RetryPolicy(attempts=1)
"""The client's own retries would hide what a service answers."""

NARROW = [("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0)]
"""Channel options with which gRPC itself keeps almost nothing of what a client does not read."""

HEALTH_POLL_S = 0.02
"""Tests wait for health to follow the engine."""

PATIENCE_S = 60.0
"""For conditions that come true in milliseconds unless something is broken."""


@dataclass(frozen=True)
class Prefill:
    """A prefill replica in this process."""

    server: RunningServer
    scheduler: PromptScheduler
    engine: PrefillEngine
    telemetry: Telemetry
    spool: Spool

    @property
    def address(self) -> str:
        return str(self.server.address)


@dataclass(frozen=True)
class Decode:
    """A decode replica in this process, and a client of it that never retries."""

    server: RunningServer
    scheduler: DecodeScheduler
    telemetry: Telemetry
    client: AsyncClient
    stub: Any
    """The bare gRPC stub, for requests that the client would refuse itself."""

    @property
    def address(self) -> str:
        return str(self.server.address)

    async def idle(self) -> None:
        """Waits until no request holds anything, and checks every block."""
        await until(lambda: not (self.scheduler.running or self.scheduler.queued or self.scheduler.blocks_used))
        (status,) = await self.client.status()
        assert (status.kv_blocks_used, status.running, status.queued) == (0, 0, 0)
        self.scheduler.check_integrity()


def everything(pack: Pack) -> Residency:
    """All layers stay in memory."""
    return Residency(frozenset(range(pack.spec.layers)), slots=0)


def quarter(pack: Pack) -> Residency:
    """A quarter of the layers' bytes: all of it slots where layers are few."""
    layers = pack.spec.layers
    return Residency(frozenset(range(1, layers, 4)), slots=2)


@asynccontextmanager
async def prefill_replica(
    path: Path,
    *,
    residency: Callable[[Pack], Residency] = everything,
    pass_tokens: int = 2048,
    queue_limit: int = 1024,
    spool_bytes: int = 64 << 20,
    spool_folder: SpoolFolder | None = None,
    cache_blocks: int = 256,
    address: Address = ANY_LOOPBACK_PORT,
    tls: TlsFiles | None = None,
    computes: bool = True,
    copies: Copies | None = None,
) -> AsyncIterator[Prefill]:
    """Serves a pack's prefill while the context is open; at its end every block must be accounted for.

    Args:
        computes: false leaves prompts waiting for ever.
        copies: to the device that computes, if that is not the CPU.
    """
    pack = Pack.open(path)
    scheduler = PromptScheduler(pass_tokens, queue_limit)
    gauges = Gauges(
        queued=lambda: scheduler.queued,
        running=lambda: scheduler.running,
        queued_tokens=lambda: scheduler.queued_tokens,
        kv_blocks=lambda: cache_blocks,
        kv_blocks_cached=lambda: cache.blocks_cached,
    )
    telemetry = _telemetry("prefill", pack, gauges)
    cache = PromptCache(BlockPool(cache_blocks, BLOCK_TOKENS), pack.manifest.model_digest)
    engine = PrefillEngine(Model(pack, residency(pack), copies=copies), layout_of(pack), scheduler, telemetry, cache)
    spool = Spool(spool_bytes, spool_folder)
    servicer = PrefillServicer(
        scheduler,
        spool,
        model_digest=pack.manifest.model_digest,
        layout=layout_of(pack),
        vocab_size=pack.spec.vocab_size,
        context_length=pack.spec.context_length,
    )
    service = Service(
        name="headrace.v1.PrefillService",
        register=lambda server: prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server),
        telemetry=telemetry,
        is_healthy=lambda: not computes or engine.health.healthy,
        on_drain=scheduler.close,
    )
    if computes:
        engine.start()
    try:
        options = ServerOptions(address=address, tls=tls, health_poll_s=HEALTH_POLL_S)
        async with serving(service, options) as server:
            yield Prefill(server, scheduler, engine, telemetry, spool)
    finally:
        scheduler.close()
        if computes:
            await asyncio.to_thread(engine.join)
        engine.check_integrity()
        spool.close()


@asynccontextmanager
async def decode_replica(
    path: Path,
    *prefills: str,
    residency: Callable[[Pack], Residency] = everything,
    draft: str = "none",
    draft_pack: Path | None = None,
    draft_length: int | None = 4,
    batch: int = 16,
    kv_blocks: int = 1024,
    overcommit: float = 1.5,
    shares_prefixes: bool = True,
    queue_limit: int = 1024,
    unread_limit: int = 256,
    local_prefill: LocalPrefill = LocalPrefill.NEVER,
    short_prompt: int | None = 16,
    pass_tokens: int = 512,
    copies: Copies | None = None,
) -> AsyncIterator[Decode]:
    """Serves a pack's decode, with those prefill replicas, while the context is open; without any it is colocated.

    Args:
        draft_length: fixed; None leaves it to the controller.
        copies: to the device that computes, if that is not the CPU.
    """
    pack = Pack.open(path)
    model = Model(pack, residency(pack), copies=copies)
    kv = PagedKeyValues(pack.spec, model.dtype, kv_blocks, model.device)
    controller = DraftController(draft_length or 0, draft_length or LONGEST_DRAFT, rows_limit=1024)
    opened = DraftPack.open(draft, draft_pack, pack)
    drafts = build_drafts(draft, opened, model, kv, kv_blocks)
    tables = BlockTables(
        BlockPool(kv_blocks, BLOCK_TOKENS),
        pack.manifest.model_digest,
        overcommit=overcommit,
        shares_prefixes=shares_prefixes,
    )
    scheduler = DecodeScheduler(
        tables,
        batch_limit=batch,
        queue_limit=queue_limit,
        unread_limit=unread_limit,
        draft_tokens=0 if draft == "none" else draft_length or LONGEST_DRAFT,
        on_preempted=lambda: telemetry.add(preemptions=1),
    )
    gauges = Gauges(
        queued=lambda: scheduler.queued,
        running=lambda: scheduler.running,
        kv_blocks_used=lambda: scheduler.blocks_used,
        kv_blocks=lambda: kv_blocks,
        kv_blocks_cached=lambda: scheduler.blocks_cached,
    )
    telemetry = _telemetry("decode", pack, gauges)
    prefill = PrefillClient(
        list(prefills),
        model_digest=pack.manifest.model_digest,
        layout=layout_of(pack),
        hidden_size=pack.spec.hidden_size,
    )
    proposer = Proposer(drafts, controller, telemetry.drafts)
    short = ShortPrompts(proposer.pass_s, lambda: scheduler.running, pass_tokens, short_prompt)
    prompts = Prompts(local_prefill, short, prefill if prefills else None, kv)
    reader, digest = _reader(pack), pack.manifest.model_digest
    scoring = Scoring(reader, prefill if prefills else None, digest)
    servicer = DecodeServicer(reader, scheduler, prompts, telemetry, digest, scoring)
    engine = DecodeEngine(model, kv, proposer, scheduler, telemetry, pass_tokens)
    service = Service(
        name="headrace.v1.DecodeService",
        register=lambda server: decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server),
        telemetry=telemetry,
        is_healthy=lambda: engine.health.healthy,
        on_drain=scheduler.close,
    )
    engine.start()
    try:
        async with (
            serving(service, ServerOptions(health_poll_s=HEALTH_POLL_S)) as server,
            AsyncClient(str(server.address), retry=ONE_TRY) as client,
            grpc.aio.insecure_channel(str(server.address)) as channel,
        ):
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            yield Decode(server, scheduler, telemetry, client, stub)
    finally:
        scheduler.close()
        await asyncio.to_thread(engine.join)
        await prefill.close()


@asynccontextmanager
async def services(
    path: Path,
    *,
    residency: Callable[[Pack], Residency] = everything,
    copies: Copies | None = None,
    **options: Any,
) -> AsyncIterator[Decode]:
    """One prefill and one decode replica of a pack; options are those of `decode_replica`."""
    async with (
        prefill_replica(path, residency=residency, copies=copies) as prefill,
        decode_replica(path, prefill.address, residency=residency, copies=copies, **options) as decode,
    ):
        yield decode


async def answers(client: AsyncClient, requests: Sequence[dict[str, Any]], *, at_once: bool) -> list[Completion]:
    """Whole answers, asked for all at once or one after another."""
    if at_once:
        return list(await asyncio.gather(*(client.complete(**request) for request in requests)))
    return [await client.complete(**request) for request in requests]


async def until(holds: Callable[[], bool]) -> None:
    """Waits for a condition of another thread or process, which there is no event for."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def _reader(pack: Pack) -> RequestReader:
    return RequestReader(
        Tokenizer(pack.tokenizer_json(), pack.chat_template(), pack.manifest.special_tokens),
        vocab_size=pack.spec.vocab_size,
        context_length=pack.spec.context_length,
        end_token_ids=frozenset(pack.manifest.end_token_ids),
    )


def _telemetry(stage: Any, pack: Pack, gauges: Gauges) -> Telemetry:
    identity = Identity(
        stage=stage,
        model_digest=pack.manifest.model_digest,
        scheme=pack.scheme.name,
        context_length=pack.spec.context_length,
        layers=pack.spec.layers,
        budget_bytes=1 << 30,
    )
    return Telemetry(identity, gauges)
