"""What prefill processes do for prompts that are sent several at once: batching, prefixes, replicas.

The service is called as decode calls it, every frame is read, and nothing is kept. The cases of a part are measured in
turns, round after round, with prompts that nobody has seen before; their processes run all the time.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import grpc

from bench.services import service
from headrace.v1 import prefill_pb2, prefill_pb2_grpc
from shared.config import CHANNEL_OPTIONS
from shared.kv.layout import layout_of
from shared.pack.reader import Pack
from shared.wire import layout_to_wire

AT_ONCE = (1, 2, 4, 8, 16, 32)
SHORT_TOKENS = 64
SHARED_TOKENS, OWN_TOKENS = 512, 32
CALLERS = 8
"""That ask at once where that is not the question."""

Prompts = Sequence[list[int]]


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much is asked of which processes."""

    pack: Pack
    path: str
    memory: str
    """Budget of each process."""
    threads: int
    prompts: int
    """In a round of a case."""
    rounds: int


@dataclass(frozen=True)
class Served:
    """One case: medians over the rounds."""

    case: str
    at_once: int
    prompts: int
    tokens_per_s: float
    """Prompt tokens, cached ones included."""
    limit_tokens_per_s: float
    """What this could reach at most; see the part."""
    cached_tokens: float
    mean_batch: float
    """Prompts in a pass."""


@dataclass(frozen=True)
class _Case:
    name: str
    at_once: int
    stubs: Sequence[Any]
    """Asked in turn."""


@dataclass(frozen=True)
class _Round:
    tokens_per_s: float
    cached_tokens: int
    mean_batch: float


def batching(load: Load) -> Iterator[Served]:
    """Short prompts, by how many are sent at once. Limit: one prompt as long as all of them, in the same rounds."""
    prompt = random_prompts(load.pack, seed=2)
    with _processes(load, [["--prefix-cache", "0"]], load.prompts * SHORT_TOKENS) as (stub,):
        whole = _Case("one long prompt", 1, [stub])
        cases = [whole, *(_Case("short prompts", at_once, [stub]) for at_once in AT_ONCE if at_once <= load.prompts)]

        def prompts_of(case: _Case) -> Prompts:
            if case is whole:
                return [prompt(load.prompts * SHORT_TOKENS)]
            return [prompt(SHORT_TOKENS) for _ in range(load.prompts)]

        found = _in_turns(load, cases, prompts_of)
    limit = _median_rate(found[0])
    yield from (_served(case, load, rounds, limit) for case, rounds in zip(cases, found, strict=True))


def prefixes(load: Load) -> Iterator[Served]:
    """Prompts that begin alike, with the cache and without. Limit: what they share is computed once, and then free."""
    prompt = random_prompts(load.pack, seed=3)
    options = [["--prefix-cache", "0"], ["--prefix-cache", "64MiB"]]
    with _processes(load, options, SHARED_TOKENS + OWN_TOKENS) as (without, within):
        cases = [
            _Case("same beginning, no cache", CALLERS, [without]),
            _Case("same beginning, cached", CALLERS, [within]),
        ]

        def prompts_of(_: _Case) -> Prompts:
            beginning = prompt(SHARED_TOKENS)  # another one in each round: none is cached already
            return [beginning + prompt(OWN_TOKENS) for _ in range(load.prompts)]

        found = _in_turns(load, cases, prompts_of)
    plain = _median_rate(found[0])
    tokens, computed = load.prompts * (SHARED_TOKENS + OWN_TOKENS), SHARED_TOKENS + load.prompts * OWN_TOKENS
    for case, rounds, limit in zip(cases, found, (plain, plain * tokens / computed), strict=True):
        yield _served(case, load, rounds, limit)


def replicas(load: Load) -> Iterator[Served]:
    """One process with all threads, and two that share them. Limit: the one, since the cores are the same."""
    prompt = random_prompts(load.pack, seed=4)
    half = str(max(1, load.threads // 2))
    each = [["--prefix-cache", "0", "--threads", threads] for threads in (str(load.threads), half, half)]
    with _processes(load, each, SHARED_TOKENS) as (one, *two):
        cases = [
            _Case(f"1 of {load.threads} threads", CALLERS, [one]),
            _Case(f"2 of {half} threads", CALLERS, two),
        ]
        found = _in_turns(load, cases, lambda _: [prompt(SHARED_TOKENS) for _ in range(load.prompts)])
    limit = _median_rate(found[0])
    yield from (_served(case, load, rounds, limit) for case, rounds in zip(cases, found, strict=True))


def random_prompts(pack: Pack, seed: int) -> Callable[[int], list[int]]:
    """A source of prompts of so many random tokens, none like another."""
    source = random.Random(seed)
    return lambda tokens: [source.randrange(pack.spec.vocab_size) for _ in range(tokens)]


@contextmanager
def _processes(load: Load, options: Sequence[Sequence[str]], longest: int) -> Iterator[list[Any]]:
    """A stub for each of some prefill processes, one for each list of options, all of which have computed something."""
    context = ["--context-length", str(longest)]
    with ExitStack() as opened:
        started = [
            opened.enter_context(service("prefill_service", load.path, load.memory, [*context, *each]))
            for each in options
        ]
        channels = [
            opened.enter_context(grpc.insecure_channel(process.address, options=CHANNEL_OPTIONS)) for process in started
        ]
        stubs = [prefill_pb2_grpc.PrefillServiceStub(channel) for channel in channels]
        for stub in stubs:
            _ask(load.pack, stub, [1, 2, 3])
        yield stubs


def _in_turns(load: Load, cases: Sequence[_Case], prompts_of: Callable[[_Case], Prompts]) -> Sequence[Sequence[_Round]]:
    """The rounds of each case."""
    rounds = [[_round(load.pack, case, prompts_of(case)) for case in cases] for _ in range(load.rounds)]
    return list(zip(*rounds, strict=True))


def _round(pack: Pack, case: _Case, prompts: Prompts) -> _Round:
    with ThreadPoolExecutor(case.at_once) as callers:
        started_s = time.perf_counter()
        results = list(callers.map(lambda stub, tokens: _ask(pack, stub, tokens), cycle(case.stubs), prompts))
        elapsed_s = time.perf_counter() - started_s
    return _Round(
        tokens_per_s=sum(map(len, prompts)) / elapsed_s,
        cached_tokens=sum(result.cached_tokens for result in results),
        mean_batch=statistics.mean(result.batch_prompts for result in results),
    )


def _ask(pack: Pack, stub: Any, token_ids: list[int]) -> prefill_pb2.PrefillResult:
    request = prefill_pb2.PrefillRequest(
        token_ids=token_ids, model_digest=pack.manifest.model_digest, kv_layout=layout_to_wire(layout_of(pack))
    )
    *_, last = stub.Prefill(request)
    result: prefill_pb2.PrefillResult = last.result
    return result


def _median_rate(rounds: Sequence[_Round]) -> float:
    return statistics.median(each.tokens_per_s for each in rounds)


def _served(case: _Case, load: Load, rounds: Sequence[_Round], limit: float) -> Served:
    return Served(
        case=case.name,
        at_once=case.at_once,
        prompts=load.prompts,
        tokens_per_s=_median_rate(rounds),
        limit_tokens_per_s=limit,
        cached_tokens=statistics.median(each.cached_tokens for each in rounds),
        mean_batch=statistics.median(each.mean_batch for each in rounds),
    )
