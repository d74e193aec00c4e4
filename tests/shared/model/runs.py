"""Ways to run a sequence through our model and through transformers; each gives the logits of every token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues
from shared.kv.prompt import PromptKeyValues
from shared.model.batch import TokenBatch
from shared.model.model import Model
from shared.pack.reader import Pack
from shared.streaming.plan import Residency


def resident_model(path: Path) -> Model:
    """The model of a pack with every layer in memory; it reads nothing ahead, so it needs no closing."""
    pack = Pack.open(path)
    return Model(pack, Residency(frozenset(range(pack.spec.layers)), slots=0))


def reference_model(path: Path, **options: object) -> nn.Module:
    """What transformers makes of a checkpoint, in float32."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()
    return model


def reference_logits(model: nn.Module, tokens: Sequence[int]) -> Tensor:
    """[tokens, vocab_size] of one sequence, computed by transformers in one go."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(tokens)])).logits[0].float()
    return logits


def prompt_logits(model: Model, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """[tokens, vocab_size] of each prompt, computed in one prefill pass that they all share."""
    with torch.inference_mode():
        batch = TokenBatch.of((prompt, 0) for prompt in prompts)
        logits = model.logits(model.forward(batch, PromptKeyValues(batch.segments)))
    return [logits[segment.rows] for segment in batch.segments]


class PagedSequences:
    """Sequences that grow pass by pass in one pool, their blocks scattered over it."""

    def __init__(self, model: Model, count: int, longest: int) -> None:
        self.model = model
        blocks = -(-longest // BLOCK_TOKENS)
        self.pool = PagedKeyValues(model.spec, model.dtype, count * blocks)
        order = list(range(count * blocks))
        random.Random(0).shuffle(order)
        self.tables = [order[index * blocks : (index + 1) * blocks] for index in range(count)]
        self.lengths = [0] * count

    def extend(self, parts: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """One pass over new tokens of some sequences, (sequence, tokens) each: their logits [tokens, vocab_size]."""
        with torch.inference_mode():
            batch = TokenBatch.of((tokens, self.lengths[sequence]) for sequence, tokens in parts)
            kv = self.pool.for_pass(batch.segments, [self.tables[sequence] for sequence, _ in parts])
            logits = self.model.logits(self.model.forward(batch, kv))
        for sequence, tokens in parts:
            self.lengths[sequence] += len(tokens)
        return [logits[segment.rows] for segment in batch.segments]


def random_tokens(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Reproducible token ids."""
    source = random.Random(seed)
    return [source.randrange(vocab_size) for _ in range(count)]
