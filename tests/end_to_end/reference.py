"""What the answers must be: computed by transformers, and by this project's model without any service."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decode_service.choice import choose_next
from decode_service.sampling import SamplingParams
from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues
from shared.model.batch import TokenBatch
from shared.model.model import Model
from shared.pack.reader import Pack
from shared.streaming.plan import Residency

GREEDY = SamplingParams()


@cache
def transformers_model(folder: Path, gguf_file: str | None = None) -> Any:
    """A checkpoint in float32."""
    from transformers import AutoModelForCausalLM

    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def transformers_greedy(model: Any, prompt: Sequence[int], max_tokens: int, **options: Any) -> tuple[int, ...]:
    """The greedy answer of transformers' own `generate` with its options, with the token that ended it."""
    with torch.inference_mode():
        generated = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
    return tuple(generated[0, len(prompt) :].tolist())


def plain_answer(
    path: Path,
    residency: Residency,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: SamplingParams = GREEDY,
) -> tuple[tuple[int, ...], list[float]]:
    """The answer of one process without gRPC, drafts or neighbours: a pass over the prompt, then one for each token.

    Returns:
        The tokens with the one that ended the answer, and at each how far the best logit is above the second, as
        a part of the best.
    """
    pack = Pack.open(path)
    model = Model(pack, residency)
    tokens, margins = list(prompt), []
    blocks = -(-(len(prompt) + max_tokens) // BLOCK_TOKENS)
    kv, known = PagedKeyValues(pack.spec, model.dtype, blocks), 0
    with torch.inference_mode():
        for known_after in range(len(prompt), len(prompt) + max_tokens):
            batch = TokenBatch.of([(tokens[known:], known)])
            hidden = model.forward(batch, kv.for_pass(batch.segments, [range(blocks)]))
            known = known_after
            logits = model.logits(hidden[-1:])[0].numpy()
            second, best = np.partition(logits, -2)[-2:]
            margins.append(float((best - second) / abs(best)))
            tokens.append(choose_next(logits, sampling, tokens, len(prompt)))
            if tokens[-1] in pack.manifest.end_token_ids:
                break
    model.close()
    return tuple(tokens[len(prompt) :]), margins
