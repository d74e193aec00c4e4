"""How well a packed model predicts a text. Layers come from disk, as in a service, so models of any size are scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.errors import ConfigurationError
from shared.kv.prompt import PromptKeyValues
from shared.model.batch import TokenBatch
from shared.model.model import Model
from shared.pack.reader import Pack
from shared.pack.texts import pack_tokenizer, start_ids
from shared.streaming.plan import FEWEST_SLOTS, Residency

WINDOW_TOKENS = 512
"""A text is cut into sequences of so many tokens; each is predicted from its own beginning."""
PASS_TOKENS = 4096
"""Tokens that share a read of the layers, where not said otherwise."""
SCORED_ROWS = 128
"""Bounds the memory of logits."""


@dataclass(frozen=True)
class Predictions:
    """What a model expected at every position of a text."""

    log_probs: Tensor
    """Natural logarithm of the probability that it gave the token that came, float32 [positions]."""
    choices: Tensor
    """The token that it held likeliest, int64 [positions]."""

    @property
    def perplexity(self) -> float:
        """e to the mean of -log_probs."""
        return float((-self.log_probs.double().mean()).exp())

    def agreement(self, other: Predictions) -> float:
        """Share of the positions where both held the same token likeliest."""
        return float((self.choices == other.choices).double().mean())


def streamed_model(pack: Pack) -> Model:
    """The model of a pack with no layer resident: the least memory that it runs in. To be closed.

    Raises:
        DataLossError, UnavailableError: the pack cannot be read as it was written.
    """
    return Model(pack, Residency(frozenset(), slots=min(FEWEST_SLOTS, pack.spec.layers)))


@torch.inference_mode()
def predictions(
    model: Model,
    sequences: Sequence[Sequence[int]],
    progress: Callable[[int, int], None] | None = None,
    *,
    pass_tokens: int = PASS_TOKENS,
) -> Predictions:
    """What a model expects after each token of each sequence but the last.

    Args:
        progress: called with the number of layers that were computed, and with how many there are in all passes.
        pass_tokens: tokens that share a read of the layers.

    Raises:
        DataLossError, UnavailableError: a layer cannot be read as it was packed.
    """
    batches = list(_batches(sequences, pass_tokens))
    log_probs, choices = [], []
    for number, batch in enumerate(batches):
        current, kv = model.begin(batch), PromptKeyValues(batch.segments)
        for layer, weights in model.walk():
            current.compute(layer, weights, kv)
            if progress is not None:
                progress(number * model.spec.layers + layer + 1, len(batches) * model.spec.layers)
        last_rows = set(batch.last_rows.tolist())
        rows = torch.tensor([row for row in range(len(batch.token_ids)) if row not in last_rows])
        for part in rows.split(SCORED_ROWS):
            logits = model.logits(current.hidden[part])
            came = batch.token_ids[part + 1]
            log_probs.append(logits.log_softmax(-1).gather(1, came[:, None])[:, 0])
            choices.append(logits.argmax(-1))
    return Predictions(torch.cat(log_probs), torch.cat(choices))


def text_windows(pack: Pack, text: str) -> list[list[int]]:
    """A text as sequences of the pack's tokens, each with what the tokenizer puts before a text.

    Raises:
        ConfigurationError: the text is too short to predict anything.
    """
    tokenizer = pack_tokenizer(pack)
    start, tokens = start_ids(tokenizer), tokenizer.encode(text, add_special_tokens=False).ids
    size = min(WINDOW_TOKENS, pack.spec.context_length) - len(start)
    windows = [start + tokens[begin : begin + size] for begin in range(0, len(tokens), size)] if size > 0 else []
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise ConfigurationError(f"the text has {len(tokens)} tokens, too few to predict any; give a longer one")
    return windows


def _batches(sequences: Sequence[Sequence[int]], pass_tokens: int) -> Iterator[TokenBatch]:
    """The sequences in order, as many in a batch as a pass takes."""
    group: list[Sequence[int]] = []
    for sequence in sequences:
        if group and sum(map(len, group)) + len(sequence) > pass_tokens:
            yield TokenBatch.of((member, 0) for member in group)
            group = []
        group.append(sequence)
    yield TokenBatch.of((member, 0) for member in group)
