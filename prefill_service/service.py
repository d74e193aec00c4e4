"""One prefill replica: settings in, a running service out."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch

from headrace.v1 import prefill_pb2_grpc
from prefill_service.engine import PrefillEngine
from prefill_service.prompt_cache import PromptCache
from prefill_service.scheduler import PromptScheduler
from prefill_service.servicer import PrefillServicer
from shared.blocks import BlockPool
from shared.budget import log_plan, measured_runtime_bytes
from shared.card import open_card
from shared.config import parse_bytes
from shared.demand import PrefillSettings, prefill_demand, spool_bytes
from shared.device import CPU
from shared.device_demand import prefill_tiers
from shared.kv.layout import layout_of
from shared.kv.paged import BLOCK_TOKENS
from shared.limits import PREFILL_PASS_TOKENS
from shared.metrics import Gauges, Identity, Telemetry
from shared.model.model import Model
from shared.options import positive, run_service, server_options, service_parser
from shared.pack.reader import Pack
from shared.quant.candidates import PROMPT_ROWS
from shared.server import Service, run_server
from shared.spool import Spool
from shared.spool_file import SpoolFolder
from shared.streaming.plan import plan_memory

log = logging.getLogger("prefill_service")

PASS_TOKENS_HELP = "prompt tokens in a pass (%(default)s)"
PREFIX_CACHE_HELP = (
    "KV kept for prompts that begin alike; 0: none (an eighth of what is left over, and what layers leave)"
)


def main(argv: list[str] | None = None) -> int:
    """Runs the service; returns the exit code."""
    parser = service_parser("prefill_service", "Turns prompts into KV caches; keeps nothing beyond the call.")
    add = parser.add_argument
    add("--pass-tokens", type=positive, default=PREFILL_PASS_TOKENS, metavar="N", help=PASS_TOKENS_HELP)
    add("--prefix-cache", metavar="SIZE", help=PREFIX_CACHE_HELP)
    add("--spool", metavar="SIZE", help="KV that may wait for slow callers (64MiB, or a layer of the longest prompt)")
    add("--spool-disk", default="1GiB", metavar="SIZE", help="KV that may wait on disk besides; 0: none (%(default)s)")
    add("--spool-dir", type=Path, metavar="FOLDER", help="where, in files without a name (/var/tmp)")
    return run_service(parser, serve, argv)


async def serve(arguments: argparse.Namespace) -> None:
    """Plans memory, loads the model, and serves until told to stop."""
    torch.set_num_threads(arguments.threads)
    pack = Pack.open(arguments.pack).for_rows(PROMPT_ROWS)
    context_length = min(arguments.context_length or pack.spec.context_length, pack.spec.context_length)
    settings = PrefillSettings(
        context_length=context_length,
        pass_tokens=arguments.pass_tokens,
        spool_bytes=spool_bytes(
            pack,
            max(context_length, arguments.pass_tokens),
            parse_bytes(arguments.spool) if arguments.spool else None,
        ),
        prefix_cache_bytes=parse_bytes(arguments.prefix_cache) if arguments.prefix_cache else None,
    )
    card = open_card(arguments.device, arguments.device_memory)
    runtime_bytes = measured_runtime_bytes([pack.scheme], card.device if card else CPU)
    if arguments.show_runtime:
        print(runtime_bytes)
        return
    plan = (
        card.plan(arguments.memory_bytes, prefill_tiers(pack, settings, runtime_bytes, card.runtime_bytes()))
        if card
        else plan_memory(arguments.memory_bytes, prefill_demand(pack, settings, runtime_bytes))
    )
    log_plan(log, plan)
    layout = layout_of(pack)
    copies = card.copies if card else None
    model = Model(pack, plan.residency, verify_always=arguments.verify == "always", copies=copies)

    scheduler = PromptScheduler(arguments.pass_tokens, arguments.queue_limit)
    spool = Spool(settings.spool_bytes, _spool_folder(arguments))
    telemetry = Telemetry(
        Identity(
            stage="prefill",
            model_digest=pack.manifest.model_digest,
            scheme=pack.scheme.name,
            context_length=settings.context_length,
            layers=pack.spec.layers,
            budget_bytes=arguments.memory_bytes,
        ),
        Gauges(
            queued=lambda: scheduler.queued,
            running=lambda: scheduler.running,
            queued_tokens=lambda: scheduler.queued_tokens,
            resident_layers=lambda: len(plan.residency.resident),
            kv_blocks=lambda: plan.kv_blocks,
            kv_blocks_cached=lambda: cache.blocks_cached,
        ),
    )
    cache = PromptCache(BlockPool(plan.kv_blocks, BLOCK_TOKENS), pack.manifest.model_digest)
    engine = PrefillEngine(model, layout, scheduler, telemetry, cache)
    servicer = PrefillServicer(
        scheduler,
        spool,
        model_digest=pack.manifest.model_digest,
        layout=layout,
        vocab_size=pack.spec.vocab_size,
        context_length=settings.context_length,
    )
    engine.start()
    try:
        await run_server(
            Service(
                name="headrace.v1.PrefillService",
                register=lambda server: prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server),
                telemetry=telemetry,
                is_healthy=lambda: engine.health.healthy,
                on_drain=scheduler.close,
            ),
            server_options(arguments),
        )
    finally:
        scheduler.close()
        engine.join()
        if copies:
            copies.close()
        spool.close()


def _spool_folder(arguments: argparse.Namespace) -> SpoolFolder | None:
    disk_bytes = parse_bytes(arguments.spool_disk)
    return SpoolFolder.checked(arguments.spool_dir, disk_bytes) if disk_bytes else None
