"""How often a target accepts drafts, by our rule and by the classical one, on real logits.

    python -m bench.acceptance [TARGET DRAFT …] [--temperatures 0 0.5 1] [--json FILE]

The target writes; before each of its tokens every draft says what it would propose there, as in a service: a copy
reads the target's keys and values, any other model has its own. Without arguments: the embedded model in bf16, its nf4
and int8 copies, and the 4-layer draft, if the folder named by `HEADRACE_BENCH_DATA` has one.

Our rule accepts where target and draft choose the same token with the same Gumbel noise. For a token i of
probabilities p in the target and q in the draft that happens with a chance of 1 ÷ Σⱼ max(pⱼ ÷ pᵢ, qⱼ ÷ qᵢ), since
exponential clocks with rates p and q that share their randomness both ring first at i; the sum over i is `coupled`.
The classical rule (Leviathan et al., arXiv 2211.17192, theorem 3.5) accepts with a chance of Σᵢ min(pᵢ, qᵢ). No rule
can do better than it at one position.

`drawn` is what really happened with the noise of one seed each. From it come tokens a pass: of a chain of k tokens,
and of the same chain with its next likeliest alternatives as leaves beside each token (a tree that costs no further
pass of the draft).
"""

from __future__ import annotations

from shared.threads import wait_passively

wait_passively()

import argparse  # noqa: E402  torch is loaded below, after the line above
import os  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from bench.checkpoints import write_draft  # noqa: E402
from bench.embedded import embedded_pack  # noqa: E402
from bench.machine import this_machine  # noqa: E402
from bench.prompts import bench_prompts  # noqa: E402
from bench.report import show_table, write_json  # noqa: E402
from decode_service.sampling import SamplingParams, gumbel_noise  # noqa: E402
from decode_service.text.conversation import Message  # noqa: E402
from decode_service.text.tokenizer import Tokenizer  # noqa: E402
from shared.draft_pack import DraftPack  # noqa: E402
from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues  # noqa: E402
from shared.model.batch import TokenBatch  # noqa: E402
from shared.model.model import Model  # noqa: E402
from shared.pack.reader import Pack  # noqa: E402
from shared.pack.sources import open_source  # noqa: E402
from shared.pack.sources.embedded import embedded_model  # noqa: E402
from shared.pack.writer import write_pack  # noqa: E402
from shared.quant.schemes import scheme_named  # noqa: E402
from shared.streaming.plan import Residency  # noqa: E402

DRAFT_LAYERS_FILE = "smollm2_draft4_layers.safetensors"
CHAINS = (4, 8, 12, 16)
BRANCHES = (1, 2, 3)
"""Tokens of the draft at each place of a chain: the chosen one, and the next best as leaves."""
SMALLEST_SHARE = 1e-300
"""Keeps ratios finite; nothing so unlikely is ever chosen."""
CONTEXT_TOKENS = 512

Probabilities = NDArray[np.float64]
Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Result:
    """One draft at one temperature."""

    draft: str
    temperature: float
    positions: int
    coupled: float
    """Chance that our rule accepts, mean over positions."""
    classical: float
    """The same of the classical rule."""
    drawn: float
    """Share of positions at which the draft's token was the target's."""
    hits: list[float]
    """Share of positions at which the target's token was among the draft's best 1, 2, 3."""
    tokens_a_pass: dict[str, list[float]]
    """Chain length -> tokens a pass with 1, 2, 3 branches."""


class Writer:
    """A target that writes many sequences at once, and drafts that look over its shoulder."""

    def __init__(self, target: Pack, drafts: Sequence[DraftPack], prompts: Sequence[list[int]]) -> None:
        self.blocks = CONTEXT_TOKENS // BLOCK_TOKENS
        self._tables = [range(at * self.blocks, (at + 1) * self.blocks) for at in range(len(prompts))]
        self.tokens = [list(prompt) for prompt in prompts]
        self._target = resident(target)
        self._kv = self._pool(self._target)
        models = [resident(draft.pack) for draft in drafts]
        pools = [
            self._kv if draft.shares_kv else self._pool(model) for draft, model in zip(drafts, models, strict=True)
        ]
        self._drafts = list(zip(models, pools, strict=True))
        starts = [(tokens[:-1], 0) for tokens in self.tokens]
        for model, kv in [pair for pair in self._drafts if pair[1] is not self._kv] + [(self._target, self._kv)]:
            self._pass(model, kv, starts)

    def step(self) -> tuple[NDArray[np.float32], list[NDArray[np.float32]]]:
        """Logits of the target, and of each draft, for the next token of every sequence: [sequences, vocabulary]."""
        last = [(tokens[-1:], len(tokens) - 1) for tokens in self.tokens]
        # The target comes last: where a copy has written, it writes again.
        drafted = [self._logits(model, kv, last) for model, kv in self._drafts]
        return self._logits(self._target, self._kv, last), drafted

    def _logits(self, model: Model, kv: PagedKeyValues, parts: list[tuple[list[int], int]]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = model.logits(self._pass(model, kv, parts)).numpy()
        return logits

    def _pass(self, model: Model, kv: PagedKeyValues, parts: list[tuple[list[int], int]]) -> torch.Tensor:
        batch = TokenBatch.of(parts)
        return model.forward(batch, kv.for_pass(batch.segments, self._tables))

    def _pool(self, model: Model) -> PagedKeyValues:
        return PagedKeyValues(model.spec, model.dtype, self.blocks * len(self._tables))


def main() -> None:
    """Measures what the command line asks for, and reports it."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode(), _packs(arguments.packs) as (target, drafts):
        prompts = _prompts(target, arguments.prompts)
        results = [
            result
            for temperature in arguments.temperatures
            for result in measure(target, drafts, prompts, temperature, arguments.tokens)
        ]
    machine = this_machine()
    show_table(f"acceptance of drafts for {target.path.name}", COLUMNS, map(row, results), machine)
    chains = [f"{length}, {branches}" for length in CHAINS for branches in BRANCHES]
    show_table("tokens a pass by chain, branches", ("draft", *chains), map(chain_row, results), machine)
    if arguments.json:
        write_json(arguments.json, machine, target=target.path.name, results=[asdict(result) for result in results])


def measure(
    target: Pack, drafts: dict[str, DraftPack], prompts: Sequence[list[int]], temperature: float, tokens: int
) -> Iterator[Result]:
    """One result for each draft; the target writes `tokens` tokens to each prompt."""
    writer = Writer(target, list(drafts.values()), prompts)
    chances = np.zeros((len(drafts), tokens, len(prompts), 2))
    ranks = np.zeros((len(drafts), tokens, len(prompts)), np.int64)
    for step in range(tokens):
        targets, drafted = writer.step()
        for logits in (targets, *drafted):
            logits[:, target.manifest.end_token_ids] = -np.inf  # what comes after an end is no text
        for place, sequence in enumerate(writer.tokens):
            params = SamplingParams(temperature=temperature, seed=place)
            chosen = int(noisy(targets[place], params, len(sequence)).argmax())
            for number, logits in enumerate(drafted):
                proposed = noisy(logits[place], params, len(sequence))
                ranks[number, step, place] = np.count_nonzero(proposed > proposed[chosen])
                if temperature:
                    p, q = (probabilities(each[place], temperature) for each in (targets, logits))
                    chances[number, step, place] = coupled_chance(p, q), np.minimum(p, q).sum()
            sequence.append(chosen)
    for number, name in enumerate(drafts):
        same = float((ranks[number] == 0).mean())
        coupled, classical = chances[number].mean((0, 1)) if temperature else (same, same)
        yield Result(
            draft=name,
            temperature=temperature,
            positions=ranks[number].size,
            coupled=float(coupled),
            classical=float(classical),
            drawn=same,
            hits=[float((ranks[number] < branches).mean()) for branches in BRANCHES],
            tokens_a_pass={
                str(length): [tokens_a_pass(ranks[number], length, branches) for branches in BRANCHES]
                for length in CHAINS
            },
        )


def noisy(logits: NDArray[np.float32], params: SamplingParams, position: int) -> Probabilities:
    """What the choice is the maximum of, [vocabulary]; the services' rule without anything that shapes logits."""
    if params.greedy:
        return logits.astype(np.float64)
    return logits.astype(np.float64) / params.temperature + gumbel_noise(params.seed, position, len(logits))


def probabilities(logits: NDArray[np.float32], temperature: float) -> Probabilities:
    """Softmax, [vocabulary]."""
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    shares: Probabilities = weights / weights.sum()
    return shares


def coupled_chance(p: Probabilities, q: Probabilities) -> float:
    """Chance that two distributions choose the same token with the same Gumbel noise.

    In order of q ÷ p, the larger term of each sum is p's for tokens up to i and q's for those behind: two running sums.
    """
    order = np.argsort(q / np.maximum(p, SMALLEST_SHARE), kind="stable")
    p, q = np.maximum(p[order], SMALLEST_SHARE), np.maximum(q[order], SMALLEST_SHARE)
    up_to, behind = p.cumsum(), q[::-1].cumsum()[::-1] - q
    return float((1.0 / (up_to / p + behind / q)).sum())


def tokens_a_pass(ranks: Ranks, length: int, branches: int) -> float:
    """What a walk over each sequence yields, with chains of `length` that have `branches` tokens at each place.

    Args:
        ranks: of the target's token among the draft's, [steps, sequences].
    """
    passes = 0
    for column in ranks.T:
        at = 0
        while at < len(column):
            ahead = column[at : at + length]
            agreed = int(np.argmax(ahead != 0)) if (ahead != 0).any() else len(ahead)
            at_a_leaf = agreed < len(ahead) and ahead[agreed] < branches
            at += agreed + at_a_leaf + 1
            passes += 1
    return ranks.size / passes


def resident(pack: Pack) -> Model:
    """The model of a pack with all layers in memory."""
    return Model(pack, Residency(frozenset(range(pack.spec.layers)), slots=0))


COLUMNS = (
    "draft",
    "temperature",
    "positions",
    "coupled",
    "classical",
    "ratio",
    "drawn",
    *(f"top {n}" for n in BRANCHES),
)


def row(result: Result) -> list[str]:
    """One line of the table."""
    return [
        result.draft,
        f"{result.temperature:g}",
        f"{result.positions:,}",
        *(f"{share:.1%}" for share in (result.coupled, result.classical)),
        f"{result.coupled / result.classical:.3f}",
        *(f"{share:.1%}" for share in (result.drawn, *result.hits)),
    ]


def chain_row(result: Result) -> list[str]:
    """Tokens a pass, one line."""
    cells = [f"{tokens:.2f}" for length in CHAINS for tokens in result.tokens_a_pass[str(length)]]
    return [f"{result.draft}, {result.temperature:g}", *cells]


@contextmanager
def _packs(paths: Sequence[Path]) -> Iterator[tuple[Pack, dict[str, DraftPack]]]:
    """The target and its drafts."""
    with tempfile.TemporaryDirectory() as folder:
        if not paths:
            data = os.environ.get("HEADRACE_BENCH_DATA")
            trained = Path(data) / DRAFT_LAYERS_FILE if data else None
            small = [_small_draft(trained, Path(folder))] if trained and trained.exists() else []
            paths = [*map(embedded_pack, ("bf16", "int8", "nf4")), *small]
        target = Pack.open(paths[0])
        opened = {path.name: DraftPack.open("auto", path, target) for path in paths[1:]}
        yield target, {name: draft for name, draft in opened.items() if draft is not None}


def _small_draft(trained: Path, folder: Path) -> Path:
    checkpoint = write_draft(open_source(embedded_model("smollm2-135m")), trained, folder / "checkpoint")
    write_pack(open_source(checkpoint), folder / "4-layers", scheme_named("bf16"), progress=None)
    return folder / "4-layers"


def _prompts(target: Pack, count: int) -> list[list[int]]:
    tokenizer = Tokenizer(target.tokenizer_json(), target.chat_template(), target.manifest.special_tokens)
    chosen = bench_prompts()[:count]
    conversations = [[Message(**message) for message in prompt.messages] for prompt in chosen]
    return [tokenizer.encode_chat(messages)[: CONTEXT_TOKENS // 2] for messages in conversations]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("packs", nargs="*", type=Path, metavar="PACK", help="the target's, then its drafts'")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    add("--prompts", type=int, default=16)
    add("--tokens", type=int, default=96, help="written to each prompt (%(default)s)")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if len(arguments.packs) == 1:
        parser.error("give the target's pack and a draft's at least, or none at all")
    if not 1 <= arguments.tokens <= CONTEXT_TOKENS // 2:
        parser.error(f"--tokens is {arguments.tokens}; it must be from 1 to {CONTEXT_TOKENS // 2}")
    return arguments


if __name__ == "__main__":
    main()
