"""One decode replica: settings in, a running service out."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch

from decode_service.drafts import DRAFTS, DraftPack, build_draft
from decode_service.engine import DecodeEngine
from decode_service.prefill_client import PrefillClient
from decode_service.prompts import LocalPrefill, Prompts
from decode_service.requests import RequestReader
from decode_service.sampling import noise_cache_bytes
from decode_service.scheduler import DecodeScheduler
from decode_service.servicer import DecodeServicer
from decode_service.speculation.controller import DraftController
from decode_service.text.tokenizer import Tokenizer
from headrace.v1 import decode_pb2_grpc
from shared.blocks import BlockPool
from shared.budget import log_plan, measured_runtime_bytes
from shared.kv.layout import layout_of
from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues
from shared.metrics import Gauges, Identity, Telemetry
from shared.model.model import Model
from shared.model.workspace import logits_workspace_bytes, pass_workspace_bytes
from shared.options import positive, run_service, server_options, service_parser
from shared.pack.reader import Pack
from shared.server import Service, run_server
from shared.streaming.plan import Demand, MemoryPlan, plan_memory

log = logging.getLogger("decode_service")

LONGEST_DRAFT = 16
MOST_SCORED_ROWS = 128
"""Bounds the memory of logits; beyond so many rows a draft hardly pays."""
UNREAD_TOKENS = 256
"""A sequence with more tokens than this waiting for its reader sits passes out."""


LOCAL_PREFILL_HELP = "prompts computed here; fallback: short ones, and any when no replica answers (%(default)s)"


def main(argv: list[str] | None = None) -> int:
    """Runs the service; returns the exit code."""
    parser = service_parser("decode_service", "Turns KV caches into tokens; owns all state of a request.")
    add = parser.add_argument
    add("--prefill", metavar="ADDRESS[,…]", help="prefill replicas; without any, prompts are computed here")
    add("--local-prefill", choices=[mode.value for mode in LocalPrefill], default="never", help=LOCAL_PREFILL_HELP)
    add("--short-prompt", type=positive, default=64, metavar="TOKENS", help="longest short prompt (%(default)s)")
    add("--pass-tokens", type=positive, default=512, metavar="N", help="local prompt tokens in a pass (%(default)s)")
    add("--draft", choices=DRAFTS, default="ngram", help="where proposals come from (%(default)s)")
    add("--draft-pack", type=Path, metavar="PACK", help="for the drafts `self` and `model`")
    add("--draft-length", type=positive, metavar="N", help="tokens proposed per pass (what pays, by measurement)")
    add("--batch", type=positive, default=16, metavar="N", help="sequences that share a pass (%(default)s)")
    return run_service(parser, serve, argv)


async def serve(arguments: argparse.Namespace) -> None:
    """Plans memory, loads the model and the draft, and serves until told to stop."""
    torch.set_num_threads(arguments.threads)
    pack = Pack.open(arguments.pack)
    draft_pack = DraftPack.open(arguments.draft, arguments.draft_pack, pack)
    context_length = min(arguments.context_length or pack.spec.context_length, pack.spec.context_length)
    plan = _plan(pack, draft_pack, arguments, context_length)
    log_plan(log, plan)
    model = Model(pack, plan.residency, verify_always=arguments.verify == "always")
    kv = PagedKeyValues(pack.spec, model.dtype, plan.kv_blocks)
    draft = build_draft(arguments.draft, draft_pack, model, kv, plan.kv_blocks)

    pool = BlockPool(plan.kv_blocks, BLOCK_TOKENS)
    scheduler = DecodeScheduler(
        pool, batch_limit=arguments.batch, queue_limit=arguments.queue_limit, unread_limit=UNREAD_TOKENS
    )
    telemetry = Telemetry(
        Identity(
            stage="decode",
            model_digest=pack.manifest.model_digest,
            scheme=pack.scheme.name,
            context_length=context_length,
            layers=pack.spec.layers,
            budget_bytes=arguments.memory_bytes,
        ),
        Gauges(
            queued=lambda: scheduler.queued,
            running=lambda: scheduler.running,
            resident_layers=lambda: len(plan.residency.resident),
            kv_blocks_used=lambda: scheduler.blocks_used,
            kv_blocks=lambda: plan.kv_blocks,
        ),
    )
    client = _prefill_client(arguments, pack)
    prompts = Prompts(LocalPrefill(arguments.local_prefill), arguments.short_prompt, client, kv)
    reader = RequestReader(
        Tokenizer(pack.tokenizer_json(), pack.chat_template(), pack.manifest.special_tokens),
        vocab_size=pack.spec.vocab_size,
        context_length=context_length,
        end_token_ids=frozenset(pack.manifest.end_token_ids),
    )
    servicer = DecodeServicer(reader, scheduler, prompts, telemetry, pack.manifest.model_digest)
    engine = DecodeEngine(model, kv, draft, scheduler, telemetry, _controller(arguments), arguments.pass_tokens)
    engine.start()
    try:
        await run_server(
            Service(
                name="headrace.v1.DecodeService",
                register=lambda server: decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server),
                telemetry=telemetry,
                is_healthy=lambda: engine.health.healthy,
                on_drain=scheduler.close,
            ),
            server_options(arguments),
        )
    finally:
        scheduler.close()
        engine.join()
        if client:
            await client.close()


def _controller(arguments: argparse.Namespace) -> DraftController:
    if arguments.draft_length:
        return DraftController(arguments.draft_length, arguments.draft_length, _scored_rows(arguments))
    return DraftController(0, LONGEST_DRAFT, _scored_rows(arguments))


def _scored_rows(arguments: argparse.Namespace) -> int:
    """Most rows of a pass whose logits are needed."""
    longest = arguments.draft_length or LONGEST_DRAFT
    return min(int(arguments.batch) * (longest + 1), max(int(arguments.batch), MOST_SCORED_ROWS))


def _prefill_client(arguments: argparse.Namespace, pack: Pack) -> PrefillClient | None:
    if not arguments.prefill:
        return None
    return PrefillClient(
        arguments.prefill.split(","),
        model_digest=pack.manifest.model_digest,
        layout=layout_of(pack),
        hidden_size=pack.spec.hidden_size,
    )


def _plan(pack: Pack, draft_pack: DraftPack | None, arguments: argparse.Namespace, context_length: int) -> MemoryPlan:
    spec, dtype = pack.spec, pack.scheme.compute_dtype
    scored = _scored_rows(arguments)
    rows = scored + (0 if arguments.prefill and arguments.local_prefill == "never" else arguments.pass_tokens)
    block_bytes = PagedKeyValues.block_bytes(spec, dtype)
    sequence_blocks = -(-context_length // BLOCK_TOKENS)
    demand = Demand(
        runtime_bytes=measured_runtime_bytes(),
        outer_bytes=pack.outer_bytes,
        draft_bytes=draft_pack.weight_bytes if draft_pack else 0,
        workspace_bytes=pass_workspace_bytes(spec, dtype, rows, context_length)
        + logits_workspace_bytes(spec, dtype, scored)
        + noise_cache_bytes(spec.vocab_size),
        layers=spec.layers,
        layer_bytes=pack.layer_layout.data_bytes,
        # attention gathers one layer's keys and values, padded to at most twice their size
        kv_block_bytes=block_bytes + 2 * block_bytes // spec.layers + (draft_pack.block_bytes if draft_pack else 0),
        fewest_kv_blocks=min(sequence_blocks, FEWEST_KV_TOKENS // BLOCK_TOKENS),
        most_kv_blocks=arguments.batch * sequence_blocks,
    )
    return plan_memory(arguments.memory_bytes, demand)


FEWEST_KV_TOKENS = 1024
"""A service whose KV memory holds less is of no use."""
