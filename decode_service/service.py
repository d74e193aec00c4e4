"""One decode replica: settings in, a running service out."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
from pathlib import Path

import torch

from decode_service.drafts import build_drafts
from decode_service.engine import DecodeEngine
from decode_service.prefill_client import PrefillClient
from decode_service.prefill_client_channel import OpenChannel, PrefillTls, open_plain
from decode_service.prompts import LocalPrefill, Prompts
from decode_service.requests import RequestReader
from decode_service.resolver import Target
from decode_service.scheduler import DecodeScheduler
from decode_service.scoring import Scoring
from decode_service.servicer import DecodeServicer
from decode_service.short_prompts import ShortPrompts
from decode_service.speculation.controller import DraftController
from decode_service.speculation.proposer import Proposer
from decode_service.tables import BlockTables
from decode_service.text.tokenizer import Tokenizer
from decode_service.warm_up import MostRows
from headrace.v1 import decode_pb2_grpc
from shared.blocks import BlockPool
from shared.budget import log_plan, measured_runtime_bytes
from shared.card import Card, open_card
from shared.demand import DecodeSettings
from shared.device import CPU
from shared.device_demand import decode_tiers
from shared.draft_pack import DRAFTS, DraftPack
from shared.draft_plan import plan_decode, worthwhile_draft
from shared.errors import ConfigurationError
from shared.kv.layout import layout_of
from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues
from shared.limits import DECODE_BATCH, LOCAL_PASS_TOKENS, LONGEST_DRAFT, OVERCOMMIT
from shared.metrics import Gauges, Identity, Telemetry
from shared.model.model import Model
from shared.options import positive, run_service, server_options, service_parser
from shared.pack.reader import Pack
from shared.quant.candidates import DECODE_ROWS
from shared.server import Service, run_server
from shared.streaming.device_plan import TieredPlan
from shared.streaming.plan import MemoryPlan

log = logging.getLogger("decode_service")

UNREAD_TOKENS = 256
"""A sequence with more tokens than this waiting for its reader sits passes out."""
DRAFT_HELP = "where proposals come from; auto: n-grams, and the draft pack where it pays (%(default)s)"
PREFILL_HELP = "prefill replicas; without this option prompts are computed here"
LOCAL_PREFILL_HELP = "prompts computed here; fallback: short ones, and any when no replica answers (%(default)s)"
SHARE_PREFIXES_HELP = "reuse keys and values of prompts and answers that begin alike (%(default)s)"
OVERCOMMIT_HELP = (
    "KV that admitted requests may all grow to, as a multiple of what there is; at 1.0 none runs out (%(default)s)"
)
PREFILL_TLS_HELP = "call prefill over TLS, as each of the next four options does; alone: the system's authorities"
PASS_TOKENS_HELP = "local prompt tokens in a pass (%(default)s)"


def main(argv: list[str] | None = None) -> int:
    """Runs the service; returns the exit code."""
    parser = service_parser("decode_service", "Turns KV caches into tokens; owns all state of a request.")
    add = parser.add_argument
    add("--prefill", type=_targets, metavar="ADDRESS[,…]", help=PREFILL_HELP)
    _add_prefill_tls(parser)
    add("--local-prefill", choices=[mode.value for mode in LocalPrefill], default="never", help=LOCAL_PREFILL_HELP)
    add("--short-prompt", type=positive, metavar="TOKENS", help="longest short prompt (what pays, by measurement)")
    add("--pass-tokens", type=positive, default=LOCAL_PASS_TOKENS, metavar="N", help=PASS_TOKENS_HELP)
    add("--draft", choices=DRAFTS, default="auto", help=DRAFT_HELP)
    add("--draft-pack", type=Path, metavar="PACK", help="for the drafts `auto`, `self` and `model`")
    add("--draft-length", type=positive, metavar="N", help="tokens proposed per pass (what pays, by measurement)")
    add("--share-prefixes", choices=("on", "off"), default="on", help=SHARE_PREFIXES_HELP)
    add("--overcommit", type=_factor, default=OVERCOMMIT, metavar="FACTOR", help=OVERCOMMIT_HELP)
    add("--batch", type=positive, default=DECODE_BATCH, metavar="N", help="sequences that share a pass (%(default)s)")
    return run_service(parser, serve, argv)


async def serve(arguments: argparse.Namespace) -> None:
    """Plans memory, loads the model and the draft, and serves until told to stop."""
    torch.set_num_threads(arguments.threads)
    open_channel = _channel_opener(arguments)
    pack = Pack.open(arguments.pack).for_rows(DECODE_ROWS)
    draft_pack = DraftPack.open(arguments.draft, arguments.draft_pack, pack)
    settings = _settings(arguments, pack)
    reader = RequestReader(
        Tokenizer(pack.tokenizer_json(), pack.chat_template(), pack.manifest.special_tokens),
        vocab_size=pack.spec.vocab_size,
        context_length=settings.context_length,
        end_token_ids=frozenset(pack.manifest.end_token_ids),
    )
    card = open_card(arguments.device, arguments.device_memory)
    schemes = [pack.scheme] + ([draft_pack.pack.scheme] if draft_pack else [])
    runtime_bytes = measured_runtime_bytes(schemes, card.device if card else CPU)
    if arguments.show_runtime:
        print(runtime_bytes)
        return
    plan, used_pack = _plan(arguments, pack, draft_pack, settings, runtime_bytes, card)
    if used_pack is not draft_pack:
        log.info("the draft's pack is left out: the memory it takes is worth more to the target")
    log_plan(log, plan)
    copies = card.copies if card else None
    model = Model(pack, plan.residency, verify_always=arguments.verify == "always", copies=copies)
    kv = PagedKeyValues(pack.spec, model.dtype, plan.kv_blocks, model.device)
    drafts = build_drafts(arguments.draft, used_pack, model, kv, plan.kv_blocks)

    tables = BlockTables(
        BlockPool(plan.kv_blocks, BLOCK_TOKENS),
        pack.manifest.model_digest,
        overcommit=arguments.overcommit,
        shares_prefixes=arguments.share_prefixes == "on",
    )
    scheduler = DecodeScheduler(
        tables,
        batch_limit=arguments.batch,
        queue_limit=arguments.queue_limit,
        unread_limit=UNREAD_TOKENS,
        draft_tokens=0 if arguments.draft == "none" else arguments.draft_length or LONGEST_DRAFT,
        on_preempted=lambda: telemetry.add(preemptions=1),
    )
    telemetry = Telemetry(
        Identity(
            stage="decode",
            model_digest=pack.manifest.model_digest,
            scheme=pack.scheme.name,
            context_length=settings.context_length,
            layers=pack.spec.layers,
            budget_bytes=arguments.memory_bytes,
        ),
        Gauges(
            queued=lambda: scheduler.queued,
            running=lambda: scheduler.running,
            resident_layers=lambda: len(plan.residency.resident),
            kv_blocks_used=lambda: scheduler.blocks_used,
            kv_blocks=lambda: plan.kv_blocks,
            kv_blocks_cached=lambda: scheduler.blocks_cached,
        ),
    )
    client = _prefill_client(arguments, pack, open_channel)
    proposer = Proposer(drafts, _controller(settings), telemetry.drafts)
    short = ShortPrompts(
        proposer.pass_s, lambda: scheduler.running, settings.missing_tokens, fixed=arguments.short_prompt
    )
    telemetry.show("short_prompt_tokens", "Most missing tokens of a prompt that counts as short.", lambda: short.limit)
    prompts = Prompts(LocalPrefill(arguments.local_prefill), short, client, kv)
    scoring = Scoring(reader, client, pack.manifest.model_digest)
    servicer = DecodeServicer(reader, scheduler, prompts, telemetry, pack.manifest.model_digest, scoring)
    warm_rows = MostRows(target=settings.scored_rows, draft=settings.batch)
    engine = DecodeEngine(model, kv, proposer, scheduler, telemetry, settings.missing_tokens, warm_rows)
    engine.start()
    try:
        await asyncio.to_thread(engine.wait_until_warm)
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
        if copies:
            copies.close()
        if client:
            await client.close()


def _targets(text: str) -> list[str]:
    """Reads where prefill replicas are. An empty text, perhaps of a variable that is not set, is not "nowhere"."""
    targets = text.split(",")
    try:
        for target in targets:
            Target.parse(target)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return targets


def _factor(text: str) -> float:
    """Reads an over-commit."""
    value = float(text)
    if not 1.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a factor of 1.0 or more")
    return value


def _settings(arguments: argparse.Namespace, pack: Pack) -> DecodeSettings:
    receives = bool(arguments.prefill) and arguments.local_prefill != "always"
    computes = not arguments.prefill or arguments.local_prefill != "never"
    return DecodeSettings(
        context_length=min(arguments.context_length or pack.spec.context_length, pack.spec.context_length),
        batch=arguments.batch,
        draft_length=arguments.draft_length,
        receives=receives,
        prompt_tokens=arguments.pass_tokens if computes else 0,
    )


def _plan(
    arguments: argparse.Namespace,
    pack: Pack,
    draft_pack: DraftPack | None,
    settings: DecodeSettings,
    runtime_bytes: int,
    card: Card | None,
) -> tuple[MemoryPlan | TieredPlan, DraftPack | None]:
    """The plan, and the draft's pack if it is part of it."""
    budget_bytes, draft = arguments.memory_bytes, arguments.draft
    if card is None:
        return plan_decode(budget_bytes, pack, draft, draft_pack, settings, runtime_bytes)
    card_bytes = card.runtime_bytes()

    def planned(with_draft: DraftPack | None) -> TieredPlan:
        return card.plan(budget_bytes, decode_tiers(pack, with_draft, settings, runtime_bytes, card_bytes))

    return worthwhile_draft(draft, draft_pack, planned)


def _controller(settings: DecodeSettings) -> DraftController:
    if settings.draft_length:
        return DraftController(settings.draft_length, settings.draft_length, settings.scored_rows)
    return DraftController(0, LONGEST_DRAFT, settings.scored_rows)


def _add_prefill_tls(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prefill-tls", action="store_true", help=PREFILL_TLS_HELP)
    add("--prefill-ca-file", type=Path, metavar="PEM", help="authorities to trust, instead of the system's")
    add("--prefill-certificate", type=Path, metavar="PEM", help="shown to replicas that ask for one")
    add("--prefill-key", type=Path, metavar="PEM")
    add("--prefill-server-name", metavar="NAME", help="the name in the replicas' certificates (the target's)")


def _channel_opener(arguments: argparse.Namespace) -> OpenChannel:
    """How prefill is called. Raises ConfigurationError where options or files of TLS cannot be used."""
    tls = PrefillTls(
        ca=arguments.prefill_ca_file,
        certificate=arguments.prefill_certificate,
        key=arguments.prefill_key,
        server_name=arguments.prefill_server_name,
    )
    if not arguments.prefill_tls and tls == PrefillTls():
        return open_plain
    if not arguments.prefill:
        raise ConfigurationError("options of TLS to prefill need --prefill, which says where it is")
    return tls.opener()


def _prefill_client(arguments: argparse.Namespace, pack: Pack, open_channel: OpenChannel) -> PrefillClient | None:
    if not arguments.prefill:
        return None
    return PrefillClient(
        arguments.prefill,
        model_digest=pack.manifest.model_digest,
        layout=layout_of(pack),
        hidden_size=pack.spec.hidden_size,
        open_channel=open_channel,
    )
