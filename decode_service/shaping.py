"""What a request does to logits before anything is drawn from them: penalties, biases and tokens that are ruled out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidRequestError

MAX_SHAPED_TOKENS = 1024
"""Most entries of logit_bias, and of bad_token_ids."""
MAX_LOGIT_BIAS = 100.0
MAX_REPETITION_PENALTY = 10.0
MAX_COUNT_PENALTY = 2.0
"""Of presence_penalty and frequency_penalty, in both directions."""


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """How one request shapes logits. By default it leaves them as they are.

    Args:
        repetition_penalty: 0.1 to 10; above 1 makes tokens of prompt and answer less likely; 1 does nothing.
        presence_penalty: -2 to 2; taken from the logit of every token that the answer already has.
        frequency_penalty: -2 to 2; taken once for each time that the answer already has the token.
        logit_bias: (token id, -100 to 100) pairs, added to logits; each id at most once, at most 1024.
        bad_token_ids: never chosen; at most 1024.
        min_tokens: the answer gets at least so many tokens.
        end_token_ids: tokens that would end the answer, ruled out before it has `min_tokens`.

    Raises:
        InvalidRequestError: names the field, its value and its range.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    end_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        low, high = 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        # Written so that NaN, which compares false with everything, is refused; single precision rounds 0.1 up.
        if not low <= self.repetition_penalty <= high:
            raise InvalidRequestError(
                f"repetition_penalty is {self.repetition_penalty}; it must be from {low:g} to {high:g}, 1 for none"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(value := getattr(self, name)) <= MAX_COUNT_PENALTY:
                raise InvalidRequestError(
                    f"{name} is {value}; it must be from -{MAX_COUNT_PENALTY:g} to {MAX_COUNT_PENALTY:g}"
                )
        for name in ("logit_bias", "bad_token_ids"):
            if (entries := len(getattr(self, name))) > MAX_SHAPED_TOKENS:
                raise InvalidRequestError(f"{name} has {entries} entries; at most {MAX_SHAPED_TOKENS} are allowed")
        for token_id, bias in self.logit_bias:
            if not abs(bias) <= MAX_LOGIT_BIAS:
                raise InvalidRequestError(
                    f"logit_bias of token {token_id} is {bias}; "
                    f"it must be from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
                )
        if self.min_tokens < 0:
            raise InvalidRequestError(f"min_tokens is {self.min_tokens}; it must be 0 or more")

    def require_vocabulary(self, vocab_size: int) -> None:
        """Checks token ids against a model.

        Raises:
            InvalidRequestError: ids are not in the vocabulary, or none is left to choose.
        """
        for name, ids in (("logit_bias", dict(self.logit_bias)), ("bad_token_ids", self.bad_token_ids)):
            unknown = sorted(token_id for token_id in ids if not 0 <= token_id < vocab_size)
            if unknown:
                raise InvalidRequestError(
                    f"{name} has {unknown[:8]}; ids must be from 0 to {vocab_size - 1}, the model's vocabulary"
                )
        if len(self.bad_token_ids | self._ends_ruled_out(generated=0)) >= vocab_size:
            raise InvalidRequestError(
                f"bad_token_ids and min_tokens rule out all {vocab_size} tokens of the vocabulary; leave one at least"
            )

    @property
    def counts_tokens(self) -> bool:
        """A penalty is on, so that the tokens before matter."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)

    def applies(self, generated: int) -> bool:
        """Whether logits change at all after so many generated tokens."""
        return self.counts_tokens or bool(self.logit_bias or self.ruled_out(generated))

    def ruled_out(self, generated: int) -> frozenset[int]:
        """Tokens that cannot be chosen after so many generated tokens."""
        return self.bad_token_ids | self._ends_ruled_out(generated)

    def _ends_ruled_out(self, generated: int) -> frozenset[int]:
        return self.end_token_ids if generated < self.min_tokens else frozenset()


def shaped_logits(
    logits: NDArray[np.float32], shaping: Shaping, tokens: Sequence[int], prompt_tokens: int
) -> NDArray[np.float32]:
    """Logits after penalties, then biases, then ruling out: [vocabulary], a copy; -inf for tokens ruled out.

    Args:
        logits: [vocabulary], of the model after `tokens`.
        tokens: the whole sequence so far.
        prompt_tokens: how many of them are the prompt.
    """
    shaped = logits.copy()
    if shaping.counts_tokens:
        history = np.asarray(tokens, dtype=np.int64)
        _penalize_repetition(shaped, history, shaping.repetition_penalty)
        _penalize_counts(shaped, history[prompt_tokens:], shaping)
    for token_id, bias in shaping.logit_bias:
        shaped[token_id] += np.float32(bias)
    for token_id in shaping.ruled_out(len(tokens) - prompt_tokens):
        shaped[token_id] = -math.inf
    return shaped


def _penalize_repetition(logits: NDArray[np.float32], history: NDArray[np.int64], penalty: float) -> None:
    """Divides the positive logits of seen tokens by the penalty and multiplies the negative ones.

    Keskar et al., "CTRL" (arXiv 1909.05858, section 4.1) divide every seen logit; multiplying negative ones, so that
    these become less likely too, is what transformers made of it, and everybody since.
    """
    if penalty != 1:
        seen = np.unique(history)
        found = logits[seen]
        logits[seen] = np.where(found > 0, found / np.float32(penalty), found * np.float32(penalty))


def _penalize_counts(logits: NDArray[np.float32], generated: NDArray[np.int64], shaping: Shaping) -> None:
    """logit -= presence_penalty · [count > 0] + frequency_penalty · count, counts over generated tokens.

    As defined by OpenAI's API reference, "Frequency and presence penalties".
    """
    if shaping.presence_penalty or shaping.frequency_penalty:
        seen, counts = np.unique(generated, return_counts=True)
        logits[seen] -= (shaping.presence_penalty + shaping.frequency_penalty * counts).astype(np.float32)
