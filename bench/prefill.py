"""How fast prompts are computed, and what it costs to hand their KV over.

    python -m bench.prefill PACK --memory 2GiB [--json FILE] [--plot FILE]
    python -m bench.prefill PACK --memory 2GiB --parts compute,handoff

compute   tokens/s of prefill passes in this process, layers resident and streamed, over the rate at which the largest
          matrix of a layer multiplies alone: same scheme, same rows, same run. That rate is the limit.
handoff   time to first token through a prefill and a decode process, against one colocated process; in turns.
batching  tokens/s of one prefill process for many short prompts, by how many are sent at once.
prefixes  the same for prompts that begin alike, with the prefix cache and without.
replicas  the same for one and for two prefill processes.

The last three call the prefill service as decode does, read every frame, and keep nothing.
"""

from __future__ import annotations

from shared.threads import wait_passively

wait_passively()

import argparse  # noqa: E402  torch is loaded below, after the line above
import random  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402
from contextlib import ExitStack, closing  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from itertools import cycle  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import grpc  # noqa: E402
import torch  # noqa: E402

from bench.machine import this_machine  # noqa: E402
from bench.report import plot, read_json, show_table, write_json  # noqa: E402
from bench.services import service  # noqa: E402
from bench.streaming import compute, residency_of, timed  # noqa: E402
from headrace import Client  # noqa: E402
from headrace.v1 import prefill_pb2, prefill_pb2_grpc  # noqa: E402
from shared.config import CHANNEL_OPTIONS  # noqa: E402
from shared.kv.layout import layout_of  # noqa: E402
from shared.model.model import Model  # noqa: E402
from shared.model.spec import ModelSpec  # noqa: E402
from shared.pack.format import matrix_shapes  # noqa: E402
from shared.pack.reader import Pack  # noqa: E402
from shared.streaming.plan import Residency  # noqa: E402
from shared.wire import layout_to_wire  # noqa: E402

PARTS = ("compute", "handoff", "batching", "prefixes", "replicas")
COMPUTE_TOKENS = (128, 512, 2048)
HANDOFF_TOKENS = (128, 1024)
AT_ONCE = (1, 4, 8, 32)
SHORT_TOKENS = 64
SHARED_TOKENS, OWN_TOKENS = 512, 32
SLOTS = 4


@dataclass(frozen=True)
class Computed:
    """One prompt length in this process: medians over the rounds."""

    tokens: int
    bare_tokens_per_s: float
    """If all matrices of a layer multiplied at the rate of the largest, and there was nothing else."""
    resident_tokens_per_s: float
    streamed_tokens_per_s: float

    @property
    def of_bare(self) -> float:
        return self.resident_tokens_per_s / self.bare_tokens_per_s

    @property
    def of_resident(self) -> float:
        return self.streamed_tokens_per_s / self.resident_tokens_per_s


@dataclass(frozen=True)
class Handoff:
    """Time to first token, one request at a time: medians over the rounds."""

    tokens: int
    colocated_ms: float
    split_ms: float
    overhead: float
    """Median over the rounds of split ÷ colocated - 1."""


@dataclass(frozen=True)
class Served:
    """What prefill processes did for prompts that were sent several at once."""

    case: str
    at_once: int
    prompts: int
    tokens_per_s: float
    """Prompt tokens, cached ones included."""
    cached_tokens: int
    mean_batch: float
    """Prompts in a pass."""


def main() -> None:
    """Measures what the command line asks for, and reports it."""
    arguments = _arguments()
    if arguments.draw is None:
        _measure(arguments)
    if arguments.plot:
        draw(arguments.draw or arguments.json, arguments.plot)


def _measure(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    machine, pack = this_machine(), Pack.open(Path(arguments.pack))
    found: dict[str, list[dict[str, Any]]] = {}
    if "compute" in arguments.parts:
        computed = list(compute_cases(pack, arguments.rounds, arguments.most_tokens))
        show_table("prefill in one process", COMPUTED_COLUMNS, map(computed_cells, computed), machine)
        found["compute"] = [asdict(case) for case in computed]
    if "handoff" in arguments.parts:
        handoffs = handoff_cases(pack, arguments)
        show_table("time to first token", HANDOFF_COLUMNS, map(handoff_cells, handoffs), machine)
        found["handoff"] = [asdict(case) for case in handoffs]
    served = list(served_cases(pack, arguments))
    if served:
        show_table("prefill processes", SERVED_COLUMNS, map(served_cells, served), machine)
        found["served"] = [asdict(case) for case in served]
    if arguments.json:
        write_json(arguments.json, machine, pack=Path(arguments.pack).name, memory=arguments.memory, **found)


def compute_cases(pack: Pack, rounds: int, most_tokens: int) -> Iterator[Computed]:
    """Prompts of several lengths, resident and streamed in turns."""
    with torch.inference_mode(), ExitStack() as opened:
        resident = opened.enter_context(closing(Model(pack, Residency(frozenset(range(pack.spec.layers)), 0))))
        streamed = opened.enter_context(closing(Model(pack, residency_of(pack.spec.layers, 0, SLOTS))))
        for tokens in (tokens for tokens in COMPUTE_TOKENS if tokens <= min(most_tokens, pack.spec.context_length)):
            seconds = [
                (
                    bare_seconds(pack, resident, tokens),
                    timed(lambda tokens=tokens: compute(resident, tokens)),
                    timed(lambda tokens=tokens: compute(streamed, tokens)),
                )
                for _ in range(rounds)
            ]
            bare, resident_s, streamed_s = (statistics.median(column) for column in zip(*seconds, strict=True))
            yield Computed(tokens, tokens / bare, tokens / resident_s, tokens / streamed_s)


def bare_seconds(pack: Pack, model: Model, tokens: int) -> float:
    """All layers' matrix products over so many rows, if all went at the rate of the largest matrix."""
    rows = torch.randn(tokens, pack.spec.hidden_size).to(model.dtype)
    products = [weights.mlp.gate_up for _, weights in model.walk() if weights.mlp is not None]

    def all_layers() -> None:
        for product in products:
            product(rows)

    return timed(all_layers) * _layer_operations(pack.spec) / (2 * pack.spec.intermediate_size * pack.spec.hidden_size)


def _layer_operations(spec: ModelSpec) -> int:
    """Multiplications of one row with all matrices of a layer."""
    return sum(rows * columns for rows, columns in matrix_shapes(spec).values())


def handoff_cases(pack: Pack, arguments: argparse.Namespace) -> list[Handoff]:
    """Two processes against one, asked in turns, always a prompt that nobody has seen."""
    context = ["--context-length", str(max(HANDOFF_TOKENS) + 64)]
    prompt = random_prompts(pack, seed=1)
    with ExitStack() as opened:
        prefill = opened.enter_context(service("prefill_service", arguments.pack, arguments.memory, context))
        split_arguments = [*context, "--draft", "none", "--prefill", prefill.address, "--local-prefill", "never"]
        split, colocated = (
            opened.enter_context(closing(Client(opened.enter_context(process).address, timeout_s=3600)))
            for process in (
                service("decode_service", arguments.pack, arguments.memory, split_arguments),
                service("decode_service", arguments.pack, arguments.memory, [*context, "--draft", "none"]),
            )
        )

        def first_token_ms(client: Client, tokens: int) -> float:
            answer = client.complete(token_ids=prompt(tokens), max_tokens=1, ignore_eos=True)
            return answer.timings.first_token_ms

        cases = []
        for tokens in HANDOFF_TOKENS:
            for client in (split, colocated):
                first_token_ms(client, tokens)
            pairs = [
                (first_token_ms(split, tokens), first_token_ms(colocated, tokens)) for _ in range(arguments.rounds)
            ]
            split_ms, colocated_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
            cases.append(Handoff(tokens, colocated_ms, split_ms, statistics.median(s / c - 1 for s, c in pairs)))
        return cases


def served_cases(pack: Pack, arguments: argparse.Namespace) -> Iterator[Served]:
    """Batching, prefixes, replicas."""
    prompt = random_prompts(pack, seed=2)
    short = [prompt(SHORT_TOKENS) for _ in range(arguments.prompts)]
    beginning = prompt(SHARED_TOKENS)
    alike = [beginning + prompt(OWN_TOKENS) for _ in range(arguments.prompts)]
    without, within = ["--prefix-cache", "0"], ["--prefix-cache", "64MiB"]
    if "batching" in arguments.parts:
        for at_once in AT_ONCE:
            yield served(pack, arguments, "short prompts", short, at_once, without)
    if "prefixes" in arguments.parts:
        yield served(pack, arguments, "same beginning, no cache", alike, 8, without)
        yield served(pack, arguments, "same beginning, cached", alike, 8, within)
    if "replicas" in arguments.parts:
        long = [prompt(SHARED_TOKENS) for _ in range(arguments.prompts)]
        for count in (1, 2):
            each = [*without, "--threads", str(max(1, arguments.threads // count))]
            yield served(pack, arguments, f"{count} of {arguments.threads // count} threads", long, 8, each, count)


def served(
    pack: Pack,
    arguments: argparse.Namespace,
    case: str,
    prompts: Sequence[list[int]],
    at_once: int,
    options: Sequence[str],
    replicas: int = 1,
) -> Served:
    """Sends prompts to fresh processes, `at_once` at a time, the replicas in turn."""
    context = ["--context-length", str(max(map(len, prompts)))]
    with ExitStack() as opened:
        processes = [
            opened.enter_context(service("prefill_service", arguments.pack, arguments.memory, [*context, *options]))
            for _ in range(replicas)
        ]
        channels = [
            opened.enter_context(grpc.insecure_channel(process.address, options=CHANNEL_OPTIONS))
            for process in processes
        ]
        stubs = [prefill_pb2_grpc.PrefillServiceStub(channel) for channel in channels]
        ask = _asking(pack)
        for stub in stubs:
            ask(stub, [1, 2, 3])
        pool = opened.enter_context(ThreadPoolExecutor(at_once))
        started_s = time.perf_counter()
        results = list(pool.map(ask, cycle(stubs), prompts))
        elapsed_s = time.perf_counter() - started_s
    return Served(
        case=case,
        at_once=at_once,
        prompts=len(prompts),
        tokens_per_s=sum(map(len, prompts)) / elapsed_s,
        cached_tokens=sum(result.cached_tokens for result in results),
        mean_batch=statistics.mean(result.batch_prompts for result in results),
    )


def _asking(pack: Pack) -> Callable[[Any, list[int]], prefill_pb2.PrefillResult]:
    layout, digest = layout_to_wire(layout_of(pack)), pack.manifest.model_digest

    def ask(stub: Any, token_ids: list[int]) -> prefill_pb2.PrefillResult:
        request = prefill_pb2.PrefillRequest(token_ids=token_ids, model_digest=digest, kv_layout=layout)
        *_, last = stub.Prefill(request)
        result: prefill_pb2.PrefillResult = last.result
        return result

    return ask


def random_prompts(pack: Pack, seed: int) -> Callable[[int], list[int]]:
    """A source of prompts of so many random tokens, none like another."""
    source = random.Random(seed)
    return lambda tokens: [source.randrange(pack.spec.vocab_size) for _ in range(tokens)]


COMPUTED_COLUMNS = ("tokens", "bare tokens/s", "resident", "of bare", "streamed", "of resident")
HANDOFF_COLUMNS = ("tokens", "one process, ms", "two, ms", "overhead")
SERVED_COLUMNS = ("case", "at once", "prompts", "tokens/s", "cached tokens", "prompts a pass")


def computed_cells(case: Computed) -> list[str]:
    """One line of the table."""
    speeds = f"{case.bare_tokens_per_s:.0f}", f"{case.resident_tokens_per_s:.0f}", f"{case.streamed_tokens_per_s:.0f}"
    return [str(case.tokens), *speeds[:2], f"{case.of_bare:.2f}", speeds[2], f"{case.of_resident:.2f}"]


def handoff_cells(case: Handoff) -> list[str]:
    """One line of the table."""
    return [str(case.tokens), f"{case.colocated_ms:.0f}", f"{case.split_ms:.0f}", f"{case.overhead:+.1%}"]


def served_cells(case: Served) -> list[str]:
    """One line of the table."""
    counts = str(case.at_once), str(case.prompts)
    return [case.case, *counts, f"{case.tokens_per_s:.0f}", str(case.cached_tokens), f"{case.mean_batch:.1f}"]


def draw(source: Path, picture: Path) -> None:
    """Draws what a run wrote: compute by prompt length, and what the processes did."""
    content = read_json(source)
    with plot(picture, 2, f"{content['pack']}, {content['memory']}") as (left, right):
        cases = content.get("compute", [])
        for name in ("bare", "resident", "streamed"):
            left.plot([c["tokens"] for c in cases], [c[f"{name}_tokens_per_s"] for c in cases], "o-", label=name)
        left.set(xlabel="tokens of the prompt", ylabel="tokens/s", title="one process", xscale="log", ylim=(0, None))
        left.legend()
        cases = content.get("served", [])
        right.barh([f"{c['case']} ({c['at_once']})" for c in cases], [c["tokens_per_s"] for c in cases])
        right.set(xlabel="prompt tokens/s", title="prefill processes (prompts at once)")
        right.invert_yaxis()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("pack", nargs="?")
    add("--memory", default="2GiB", help="budget of each process")
    add("--parts", type=lambda text: text.split(","), default=list(PARTS), help=f"of {','.join(PARTS)}")
    add("--rounds", type=int, default=5)
    add("--prompts", type=int, default=32, help="for batching, prefixes and replicas")
    add("--most-tokens", type=int, default=max(COMPUTE_TOKENS), help="longest prompt of `compute`")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="needs --json or --draw")
    add("--draw", type=Path, metavar="FILE", help="JSON of an earlier run, to be plotted")
    arguments = parser.parse_args()
    if arguments.plot and not (arguments.json or arguments.draw):
        parser.error("a plot is drawn from JSON: give --json or --draw")
    if not (arguments.pack or arguments.draw):
        parser.error("give a pack, or --draw")
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    return arguments


if __name__ == "__main__":
    main()
