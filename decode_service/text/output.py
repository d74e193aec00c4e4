"""What one sequence's tokens become for its reader: text, reported tokens, and the end."""

from __future__ import annotations

import enum
from collections.abc import Sequence, Set
from dataclasses import dataclass

from decode_service.text.detokenizer import IncrementalDetokenizer
from decode_service.text.stopping import StopConditions, StopStringMatcher
from decode_service.text.tokenizer import Tokenizer
from shared.logprobs import TokenLogprobs


class FinishReason(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens, which the caller limits to what the context has left."""


@dataclass(frozen=True)
class Emission:
    """What became known by one push."""

    text: str
    """New text; may lag behind the tokens."""
    token_ids: list[int]
    """New tokens of the answer, in order, including the one that ended it."""
    finish: FinishReason | None
    """Why the answer has ended; None while it goes on."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids` where the request asked for them."""


class TextOutput:
    """The answer of one sequence as it grows. Not thread safe.

    Args:
        tokenizer: the model's.
        conditions: when to stop.
        end_ids: the model's own end-of-sequence tokens.
    """

    def __init__(self, tokenizer: Tokenizer, conditions: StopConditions, end_ids: Set[int]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopStringMatcher(conditions.strings)
        self._stop_ids = conditions.token_ids | end_ids
        self._tokens_left = conditions.max_tokens
        self._finish: FinishReason | None = None

    @property
    def finish(self) -> FinishReason | None:
        """Why the answer has ended; None while it goes on."""
        return self._finish

    @property
    def tokens_left(self) -> int:
        """Tokens that the answer may still have."""
        return self._tokens_left

    def push(self, token_ids: Sequence[int]) -> Emission:
        """Takes accepted tokens up to the one that ends the answer; those after it are discarded."""
        taken: list[int] = []
        pieces: list[str] = []
        for token_id in token_ids:
            if self._finish:
                break
            taken.append(token_id)
            pieces.append(self._take(token_id))
        return Emission("".join(pieces), taken, self._finish)

    def _take(self, token_id: int) -> str:
        """Text that one token decides. Reaching a stop counts as such even with the last token allowed."""
        self._tokens_left -= 1
        if token_id in self._stop_ids:
            self._finish = FinishReason.STOP
            return self._flush()
        text = self._match(self._detokenizer.push(token_id))
        if self._finish or self._tokens_left:
            return text
        self._finish = FinishReason.LENGTH
        return text + self._flush()

    def _match(self, text: str) -> str:
        released, hit = self._matcher.push(text)
        if hit:
            self._finish = FinishReason.STOP
        return released

    def _flush(self) -> str:
        """The undecided rest, which may itself complete a stop string."""
        return self._match(self._detokenizer.finish()) + self._matcher.finish()
