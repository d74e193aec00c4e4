"""How fast prompts are computed, and what it costs to hand their KV over.

    python -m bench.prefill PACK --memory 2GiB [--json FILE] [--plot FILE]
    python -m bench.prefill PACK --memory 2GiB --parts compute,handoff --rounds 3
    python -m bench.prefill PACK --memory 2GiB --quick       one round of short prompts: whether everything works
    python -m bench.prefill --draw FILE --plot FILE          only draws what was measured before

compute   tokens/s of prefill passes in this process, layers resident and streamed. Limit: the rate at which the largest
          matrix of a layer multiplies alone, with the same scheme and rows.
handoff   time to first token through a prefill and a decode process, against one colocated process, which is the limit;
          and the handoff alone, with nothing to compute (`bench.transfer`): its time, and its processor time against
          that of the same bytes in messages that nobody looks into. Hidden is what of the handoff's time goes on while
          layers are computed: 1 - after / alone, where `after` is the time of the call to prefill, as decode sees it,
          less that of the pass.
batching  tokens/s of one prefill process for many short prompts, by how many are sent at once. Limit: one prompt of as
          many tokens.
prefixes  the same for prompts that begin alike, with the prefix cache and without. Limit: the rate without, times what
          is asked for over what has to be computed.
replicas  the same for one prefill process and for two that share its threads. Limit: the one process.

Cases of a part are measured in turns, round after round; medians are reported. Results are written after each case, so
that an interrupted run keeps what it has, beside what FILE holds of other parts for the same pack, machine and day.
"""

from __future__ import annotations

from shared.threads import wait_passively

wait_passively()

import argparse  # noqa: E402  torch is loaded below, after the line above
import statistics  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from contextlib import ExitStack, closing  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from bench import prefill_served  # noqa: E402
from bench.machine import Machine, this_machine  # noqa: E402
from bench.prefill_served import Load, Served, random_prompts  # noqa: E402
from bench.report import plot, read_json, show_table, write_json  # noqa: E402
from bench.services import service  # noqa: E402
from bench.streaming import compute, residency_of, timed  # noqa: E402
from bench.transfer import transfers  # noqa: E402
from headrace import Client  # noqa: E402
from headrace.types import Timings  # noqa: E402
from shared.model.model import Model  # noqa: E402
from shared.model.spec import ModelSpec  # noqa: E402
from shared.pack.format import matrix_shapes  # noqa: E402
from shared.pack.reader import Pack  # noqa: E402
from shared.streaming.plan import Residency  # noqa: E402

COMPUTE_TOKENS = (128, 512, 2048)
HANDOFF_TOKENS = (128, 1024)
SLOTS = 4
QUICK = {"rounds": 1, "prompts": 8, "most_tokens": 128}


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
    transfer_ms: float
    """The handoff alone, with nothing to compute."""
    after_ms: float
    """Of the call to prefill besides its pass: what of the handoff is not hidden, and the call itself."""
    sender_s_per_gb: float
    """Processor seconds of the handoff alone ÷ 10⁹ bytes of keys and values."""
    receiver_s_per_gb: float
    bare_sender_s_per_gb: float
    """The same for messages that nobody looks into."""
    bare_receiver_s_per_gb: float

    @property
    def hidden(self) -> float:
        return 1 - self.after_ms / self.transfer_ms


@dataclass(frozen=True)
class Part:
    """One question."""

    title: str
    measure: Callable[[Pack, argparse.Namespace], Iterator[Any]]
    columns: Sequence[str]
    cells: Callable[[Any], list[str]]


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
    found = _earlier(arguments, machine)
    about = {"pack": Path(arguments.pack).name, "memory": arguments.memory}
    for name in arguments.parts:
        part, cases = PARTS[name], []
        for case in part.measure(pack, arguments):
            cases.append(case)
            found[name] = [asdict(each) for each in cases]
            if arguments.json:
                write_json(arguments.json, machine, **about, **{name: found[name] for name in PARTS if name in found})
        show_table(part.title, part.columns, map(part.cells, cases), machine)


def _earlier(arguments: argparse.Namespace, machine: Machine) -> dict[str, Any]:
    """What the file to be written holds already of this pack, measured on this machine today."""
    if not (arguments.json and arguments.json.exists()):
        return {}
    content = read_json(arguments.json)
    same = content["machine"] == asdict(machine) and content["pack"] == Path(arguments.pack).name
    return content if same else {}


def compute_cases(pack: Pack, arguments: argparse.Namespace) -> Iterator[Computed]:
    """Prompts of several lengths, resident and streamed in turns."""
    longest = min(arguments.most_tokens, pack.spec.context_length)
    with torch.inference_mode(), ExitStack() as opened:
        resident = opened.enter_context(closing(Model(pack, Residency(frozenset(range(pack.spec.layers)), 0))))
        streamed = opened.enter_context(closing(Model(pack, residency_of(pack.spec.layers, 0, SLOTS))))
        for tokens in (tokens for tokens in COMPUTE_TOKENS if tokens <= longest):
            seconds = [
                (
                    bare_seconds(pack, resident, tokens),
                    timed(partial(compute, resident, tokens)),
                    timed(partial(compute, streamed, tokens)),
                )
                for _ in range(arguments.rounds)
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


def handoff_cases(pack: Pack, arguments: argparse.Namespace) -> Iterator[Handoff]:
    """Two processes against one, asked in turns, always a prompt that nobody has seen; before, the handoff alone."""
    lengths = [tokens for tokens in HANDOFF_TOKENS if tokens <= arguments.most_tokens]
    alone = transfers(arguments.pack, lengths, arguments.rounds)
    context = ["--context-length", str(max(lengths) + 64)]
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

        def asked(client: Client, tokens: int) -> Timings:
            return client.complete(token_ids=prompt(tokens), max_tokens=1, ignore_eos=True).timings

        for transfer in alone:
            tokens = transfer.tokens
            for client in (split, colocated):
                asked(client, tokens)
            pairs = [(asked(split, tokens), asked(colocated, tokens)) for _ in range(arguments.rounds)]
            first_tokens = [(two.first_token_ms, one.first_token_ms) for two, one in pairs]
            split_ms, colocated_ms = (statistics.median(column) for column in zip(*first_tokens, strict=True))
            yield Handoff(
                tokens=tokens,
                colocated_ms=colocated_ms,
                split_ms=split_ms,
                overhead=statistics.median(two / one - 1 for two, one in first_tokens),
                transfer_ms=transfer.wall_ms,
                after_ms=statistics.median(two.prefill_ms - two.prefill_compute_ms for two, _ in pairs),
                sender_s_per_gb=transfer.sender_s_per_gb,
                receiver_s_per_gb=transfer.receiver_s_per_gb,
                bare_sender_s_per_gb=transfer.bare_sender_s_per_gb,
                bare_receiver_s_per_gb=transfer.bare_receiver_s_per_gb,
            )


def _serving(cases: Callable[[Load], Iterator[Served]]) -> Callable[[Pack, argparse.Namespace], Iterator[Served]]:
    return lambda pack, arguments: cases(
        Load(
            pack=pack,
            path=arguments.pack,
            memory=arguments.memory,
            threads=arguments.threads,
            prompts=arguments.prompts,
            rounds=arguments.rounds,
        )
    )


COMPUTED_COLUMNS = ("tokens", "bare tokens/s", "resident", "of bare", "streamed", "of resident")
HANDOFF_COLUMNS = (
    "tokens",
    "one process, ms",
    "two, ms",
    "overhead",
    "handoff alone, ms",
    "after, ms",
    "hidden",
    "sender s/GB (bare)",
    "receiver s/GB (bare)",
)
SERVED_COLUMNS = ("case", "at once", "prompts", "tokens/s", "of limit", "cached tokens", "prompts a pass")


def computed_cells(case: Computed) -> list[str]:
    """One line of the table."""
    speeds = f"{case.bare_tokens_per_s:.0f}", f"{case.resident_tokens_per_s:.0f}", f"{case.streamed_tokens_per_s:.0f}"
    return [str(case.tokens), *speeds[:2], f"{case.of_bare:.2f}", speeds[2], f"{case.of_resident:.2f}"]


def handoff_cells(case: Handoff) -> list[str]:
    """One line of the table."""
    times = (
        f"{case.colocated_ms:.0f}",
        f"{case.split_ms:.0f}",
        f"{case.overhead:+.1%}",
        f"{case.transfer_ms:.0f}",
        f"{case.after_ms:.1f}",
    )
    sender = f"{case.sender_s_per_gb:.2f} ({case.bare_sender_s_per_gb:.2f})"
    receiver = f"{case.receiver_s_per_gb:.2f} ({case.bare_receiver_s_per_gb:.2f})"
    return [str(case.tokens), *times, f"{case.hidden:.2f}", sender, receiver]


def served_cells(case: Served) -> list[str]:
    """One line of the table."""
    counts, of_limit = (str(case.at_once), str(case.prompts)), case.tokens_per_s / case.limit_tokens_per_s
    rates = f"{case.tokens_per_s:.0f}", f"{of_limit:.2f}"
    return [case.case, *counts, *rates, f"{case.cached_tokens:.0f}", f"{case.mean_batch:.1f}"]


PARTS = {
    "compute": Part("prefill in one process", compute_cases, COMPUTED_COLUMNS, computed_cells),
    "handoff": Part("time to first token", handoff_cases, HANDOFF_COLUMNS, handoff_cells),
    "batching": Part("short prompts", _serving(prefill_served.batching), SERVED_COLUMNS, served_cells),
    "prefixes": Part("prompts that begin alike", _serving(prefill_served.prefixes), SERVED_COLUMNS, served_cells),
    "replicas": Part("prefill processes", _serving(prefill_served.replicas), SERVED_COLUMNS, served_cells),
}


SERVED = ("batching", "prefixes", "replicas")


def draw(source: Path, picture: Path) -> None:
    """Draws what a run wrote: compute by prompt length, and what the processes did."""
    content = read_json(source)
    with plot(picture, 2, f"{content['pack']}, {content['memory']}") as (left, right):
        cases = content.get("compute", [])
        for name in ("bare", "resident", "streamed"):
            left.plot([c["tokens"] for c in cases], [c[f"{name}_tokens_per_s"] for c in cases], "o-", label=name)
        left.set(xlabel="tokens of the prompt", ylabel="tokens/s", title="one process", xscale="log", ylim=(0, None))
        left.legend()
        cases = [case for name in SERVED for case in content.get(name, [])]
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
    add("--prompts", type=int, default=32, help="in a round of batching, prefixes and replicas")
    add("--most-tokens", type=int, default=max(COMPUTE_TOKENS), help="longest prompt of compute and handoff")
    add("--quick", action="store_true", help=f"{QUICK}")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="needs --json or --draw")
    add("--draw", type=Path, metavar="FILE", help="JSON of an earlier run, to be plotted")
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    if arguments.plot and not (arguments.json or arguments.draw):
        parser.error("a plot is drawn from JSON: give --json or --draw")
    if not (arguments.pack or arguments.draw):
        parser.error("give a pack, or --draw")
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    return arguments


if __name__ == "__main__":
    main()
