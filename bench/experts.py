"""What reading experts one by one saves: bytes read per token, beside streaming whole layers in the same memory.

    python -m bench.experts [--layers 8 --experts 64 --chosen 4 …] [--json FILE]

Makes a random Qwen3-MoE model in a temporary folder, packs it, and decodes in passes like those of the service: each
sequence brings its last token and, with a draft, that many proposals, of which each is right with a chance of
`--acceptance`. Memory for weights is a share of all weights, spent as the services' planner spends it; 0 % is the least
that works. Bytes of whole-layer streaming are computed: the layers that fit stay, the others are read in each pass.

Tokens are drawn with the frequencies of words (1 / rank). Which experts a random router prefers says nothing about a
trained one, which prefers some more and others less: then caches find more than here.
"""

from __future__ import annotations

from shared.threads import wait_passively

wait_passively()

import argparse  # noqa: E402  torch is loaded below, after the line above
import json  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from contextlib import closing  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from itertools import accumulate  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from torch import Tensor  # noqa: E402

from bench.machine import this_machine  # noqa: E402
from bench.report import show_table, write_json  # noqa: E402
from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues  # noqa: E402
from shared.model.batch import TokenBatch  # noqa: E402
from shared.model.model import Model  # noqa: E402
from shared.pack.reader import Pack  # noqa: E402
from shared.pack.sources import open_source  # noqa: E402
from shared.pack.writer import write_pack  # noqa: E402
from shared.quant.schemes import scheme_named  # noqa: E402
from shared.streaming.plan import Demand, MemoryPlan, plan_memory  # noqa: E402

PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Result:
    """Passes of one kind, after some that filled the cache."""

    batch: int
    draft: int
    """Tokens that each sequence proposes in a pass."""
    memory_percent: int
    memory_bytes: int
    """For weights."""
    experts_kept: float
    """Share of experts that stay in memory."""
    tokens_per_pass: float
    """That a pass yields: its proposals that are right, and one more for each sequence."""
    experts_per_pass: float
    """That passes needed, of all layers."""
    found: float
    """Share of these that were in memory."""
    read_bytes_per_token: float
    whole_layers_bytes_per_token: float
    """What whole-layer streaming would read, with as much memory."""
    pass_s: float

    @property
    def saving(self) -> float:
        return self.whole_layers_bytes_per_token / self.read_bytes_per_token


def main() -> None:
    """Measures what the command line asks for, and reports it."""
    arguments = _arguments()
    if arguments.make:
        arguments.make.mkdir(parents=True)
        make_pack(arguments.make, arguments)
        return
    machine = this_machine()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, torch.inference_mode():
        pack = make_pack(Path(folder), arguments)
        print(f"{pack.layers_bytes / 1e6:,.0f} MB of layers, an expert has {pack.expert_bytes / 1e6:.2f} MB")
        results = []
        for draft in arguments.drafts:
            for percent in arguments.memory:
                for batch in arguments.batches:
                    results.append(measure(pack, arguments, batch, draft, percent))
                    print(f"batch {batch}, draft {draft}, {percent} % in memory: {results[-1].pass_s:.3f} s a pass")
    model = {
        name: getattr(arguments, name) for name in ("layers", "experts", "chosen", "hidden", "intermediate", "scheme")
    }
    sizes = {"layers_bytes": pack.layers_bytes, "expert_bytes": pack.expert_bytes}
    title = "bytes read per token, experts one by one and whole layers"
    show_table(title, COLUMNS, map(cells, results), machine)
    if arguments.json:
        passes = {"passes": arguments.passes, "warm_up": arguments.warm_up, "acceptance": arguments.acceptance}
        found = [asdict(result) | {"saving": result.saving} for result in results]
        write_json(arguments.json, machine, model=model | sizes, run=passes, results=found)


def measure(pack: Pack, arguments: argparse.Namespace, batch: int, draft: int, percent: int) -> Result:
    """Decodes with a share of the weights in memory."""
    plan = plan_weights(pack, percent)
    with closing(Model(pack, plan.residency)) as model:
        decoding = Decoding(model, batch, draft, arguments.acceptance, arguments.warm_up + arguments.passes)
        for _ in range(arguments.warm_up):
            decoding.run_pass()
        assert model.experts is not None
        uses, reads, read_bytes = model.experts.uses, model.experts.reads, model.streamed_bytes
        samples = [decoding.run_pass() for _ in range(arguments.passes)]
        uses, reads = model.experts.uses - uses, model.experts.reads - reads
        read_bytes = model.streamed_bytes - read_bytes
    tokens = sum(tokens for tokens, _ in samples)
    return Result(
        batch=batch,
        draft=draft,
        memory_percent=percent,
        memory_bytes=plan.planned_bytes,
        experts_kept=plan.kept_share,
        tokens_per_pass=tokens / len(samples),
        experts_per_pass=uses / len(samples),
        found=1 - reads / uses,
        read_bytes_per_token=read_bytes / tokens,
        whole_layers_bytes_per_token=whole_layers_bytes(pack, plan.planned_bytes) * len(samples) / tokens,
        pass_s=statistics.median(elapsed_s for _, elapsed_s in samples),
    )


def plan_weights(pack: Pack, percent: int) -> MemoryPlan:
    """Spends that share of all weights on weights, or the least that works."""
    demand = Demand(
        runtime_bytes=0,
        outer_bytes=0,
        workspace_bytes=0,
        layers=pack.spec.layers,
        layer_bytes=pack.layer_layout.data_bytes,
        experts=pack.spec.layers * pack.experts_per_layer,
        expert_bytes=pack.expert_bytes,
    )
    return plan_memory(max(pack.layers_bytes * percent // 100, demand.least_bytes), demand)


def whole_layers_bytes(pack: Pack, memory_bytes: int) -> int:
    """What a pass reads where layers come whole, with as much memory (or two layers, where that is less)."""
    layers, layer_bytes = pack.spec.layers, pack.layers_bytes // pack.spec.layers
    demand = Demand(runtime_bytes=0, outer_bytes=0, workspace_bytes=0, layers=layers, layer_bytes=layer_bytes)
    plan = plan_memory(max(memory_bytes, demand.least_bytes), demand)
    return (layers - len(plan.residency.resident)) * layer_bytes


class Decoding:
    """Sequences that grow pass by pass through texts known beforehand."""

    def __init__(self, model: Model, batch: int, draft: int, acceptance: float, passes: int) -> None:
        longest = PROMPT_TOKENS + (passes + 1) * (draft + 1)
        blocks = -(-longest // BLOCK_TOKENS)
        self._model, self._draft, self._acceptance = model, draft, acceptance
        self._random = random.Random(batch)
        self._words = Words(model.spec.vocab_size, self._random)
        self._texts = [self._words.draw(longest) for _ in range(batch)]
        self._pool = PagedKeyValues(model.spec, model.dtype, batch * blocks)
        self._tables = [list(range(number * blocks, (number + 1) * blocks)) for number in range(batch)]
        self._lengths = [0] * batch
        self._forward([text[:PROMPT_TOKENS] for text in self._texts])
        self._lengths = [PROMPT_TOKENS] * batch

    def run_pass(self) -> tuple[int, float]:
        """One decode pass; returns the tokens it yields and what it took, in seconds."""
        accepted = [self._accepted() for _ in self._texts]
        chains = []
        for text, length, right in zip(self._texts, self._lengths, accepted, strict=True):
            wrong = self._words.draw(self._draft - right)
            chains.append(text[length : length + 1 + right] + wrong)
        started_s = time.perf_counter()
        self._forward(chains)
        elapsed_s = time.perf_counter() - started_s
        self._lengths = [length + 1 + right for length, right in zip(self._lengths, accepted, strict=True)]
        return len(accepted) + sum(accepted), elapsed_s

    def _accepted(self) -> int:
        """How many proposals are right before the first wrong one."""
        right = 0
        while right < self._draft and self._random.random() < self._acceptance:
            right += 1
        return right

    def _forward(self, chains: list[list[int]]) -> None:
        batch = TokenBatch.of(zip(chains, self._lengths, strict=True))
        hidden = self._model.forward(batch, self._pool.for_pass(batch.segments, self._tables))
        self._model.logits(hidden)


class Words:
    """Token ids with the frequencies of words: proportional to 1 / rank."""

    def __init__(self, vocab_size: int, source: random.Random) -> None:
        self._ids = list(range(vocab_size))
        source.shuffle(self._ids)
        self._weights = list(accumulate(1 / rank for rank in range(1, vocab_size + 1)))
        self._source = source

    def draw(self, count: int) -> list[int]:
        """That many tokens."""
        return self._source.choices(self._ids, cum_weights=self._weights, k=count) if count else []


def make_pack(folder: Path, arguments: argparse.Namespace) -> Pack:
    """A random model, packed; its checkpoint is made a layer at a time."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(_shards(arguments)):
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, checkpoint / name)
        weight_map |= dict.fromkeys(tensors, name)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (checkpoint / "config.json").write_text(json.dumps(_config(arguments)))
    Tokenizer(models.BPE()).save(str(checkpoint / "tokenizer.json"))
    write_pack(open_source(checkpoint), folder / "pack", scheme_named(arguments.scheme))
    for shard in checkpoint.glob("*.safetensors"):
        shard.unlink()
    return Pack.open(folder / "pack")


def _config(arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.intermediate,
        "moe_intermediate_size": arguments.intermediate,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.hidden // 64,
        "num_key_value_heads": max(1, arguments.hidden // 256),
        "head_dim": 64,
        "num_experts": arguments.experts,
        "num_experts_per_tok": arguments.chosen,
        "norm_topk_prob": True,
        "vocab_size": arguments.vocab,
        "tie_word_embeddings": True,
    }


def _shards(arguments: argparse.Namespace) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    hidden, intermediate, kv_size = arguments.hidden, arguments.intermediate, max(1, arguments.hidden // 256) * 64

    # As in trained models, a token's own features outweigh what each layer adds: otherwise all go to the same experts.
    adding = (2 * arguments.layers) ** -0.5

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5 * scale).to(torch.bfloat16)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    embedding = matrix(arguments.vocab, hidden, scale=hidden**0.5)
    yield {"model.embed_tokens.weight": embedding, "model.norm.weight": ones(hidden)}
    for layer in range(arguments.layers):
        tensors = {"input_layernorm": ones(hidden), "post_attention_layernorm": ones(hidden)}
        tensors |= {"self_attn.q_norm": ones(64), "self_attn.k_norm": ones(64)}
        sizes = {"q": (hidden, hidden), "k": (kv_size, hidden), "v": (kv_size, hidden)}
        tensors |= {f"self_attn.{name}_proj": matrix(*size) for name, size in sizes.items()}
        tensors["self_attn.o_proj"] = matrix(hidden, hidden, adding)
        tensors["mlp.gate"] = matrix(arguments.experts, hidden)
        for expert in range(arguments.experts):
            name = f"mlp.experts.{expert}"
            tensors |= {f"{name}.{part}_proj": matrix(intermediate, hidden) for part in ("gate", "up")}
            tensors[f"{name}.down_proj"] = matrix(hidden, intermediate, adding)
        yield {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in tensors.items()}


COLUMNS = (
    *("memory", "MB", "kept", "batch", "draft", "tokens", "experts", "found", "MB read a token"),
    *("in whole layers", "saving", "s a pass"),
)


def cells(result: Result) -> list[str]:
    """One line of the table."""
    return [
        f"{result.memory_percent} %",
        f"{result.memory_bytes / 1e6:,.0f}",
        f"{result.experts_kept:.0%}",
        str(result.batch),
        str(result.draft),
        f"{result.tokens_per_pass:.1f}",
        f"{result.experts_per_pass:.0f}",
        f"{result.found:.0%}",
        f"{result.read_bytes_per_token / 1e6:.1f}",
        f"{result.whole_layers_bytes_per_token / 1e6:.1f}",
        f"{result.saving:.1f}×",
        f"{result.pass_s:.3f}",
    ]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=8)
    add("--experts", type=int, default=64, help="in each layer (%(default)s)")
    add("--chosen", type=int, default=4, help="for each token (%(default)s)")
    add("--hidden", type=int, default=1024)
    add("--intermediate", type=int, default=256, help="of each expert (%(default)s)")
    add("--vocab", type=int, default=4096)
    add("--scheme", default="bf16")
    add("--batches", type=_numbers, default=[1, 8, 32], metavar="N,…")
    add("--drafts", type=_numbers, default=[0, 4], metavar="N,…", help="tokens proposed in a pass")
    add("--acceptance", type=float, default=0.8, help="chance that a proposal is right (%(default)s)")
    add("--memory", type=_numbers, default=[0, 25, 50], metavar="PERCENT,…")
    add("--passes", type=int, default=24)
    add("--warm-up", type=int, default=16, help="passes before those that count (%(default)s)")
    add("--folder", type=Path, help="where the model is made (the system's temporary folder)")
    add("--make", type=Path, metavar="OUT", help="only make the model, as OUT/pack, for other benchmarks")
    add("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
