"""When an answer ends, and how text is held back until a stop string is ruled out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import InvalidRequestError

MAX_STOP_STRINGS = 16


@dataclass(frozen=True)
class StopConditions:
    """When one answer ends, besides the model's own end-of-sequence tokens.

    Args:
        max_tokens: most tokens to generate, 1 or more.
        strings: stop before any of these; at most 16, none empty.
        token_ids: stop after any of these.

    Raises:
        InvalidRequestError: names the field, its value and its range.
    """

    max_tokens: int
    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidRequestError(f"stopping.max_tokens is {self.max_tokens}; it must be 1 or more")
        if len(self.strings) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stopping.strings has {len(self.strings)} entries; at most {MAX_STOP_STRINGS} are allowed"
            )
        if "" in self.strings:
            raise InvalidRequestError(
                f"stopping.strings[{self.strings.index('')}] is empty; every stop string needs at least one character"
            )

    def require_vocabulary(self, vocab_size: int) -> None:
        """Checks the stop tokens against a model.

        Raises:
            InvalidRequestError: names the ids that are not in the vocabulary.
        """
        unknown = sorted(token_id for token_id in self.token_ids if not 0 <= token_id < vocab_size)
        if unknown:
            raise InvalidRequestError(
                f"stopping.token_ids has {unknown[:8]}; ids must be from 0 to {vocab_size - 1}, the model's vocabulary"
            )


class StopStringMatcher:
    """Releases text that cannot be part of a stop string, until one is complete.

    What counts is the stop string that is *completed* first; of several completed by the same character, the longest.
    So the result does not depend on how the text is cut into pieces. The cost per character does not depend on the
    length of the stop strings.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._matches = [_PartialMatch(string) for string in strings]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Takes more text; returns what is safe to release, and whether a stop string was hit.

        On a hit, that is the rest of the text before the stop string; what follows it is dropped. Nothing may be pushed
        after a hit.
        """
        seen = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = [match.length for match in self._matches if match.advance(character)]
            if complete:
                self._held = ""
                return seen[: end - max(complete)], True
        held = max((match.matched for match in self._matches), default=0)
        released = len(seen) - held
        self._held = seen[released:]
        return seen[:released], False

    def finish(self) -> str:
        """Releases what was held back: no more text comes, so it is no stop string."""
        held, self._held = self._held, ""
        return held


class _PartialMatch:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt, 1977).

    The table of borders grows with the match, so that a long stop string costs nothing before the text resembles it.
    """

    def __init__(self, string: str) -> None:
        self._string = string
        self._borders: list[int] = [0]
        self.length = len(string)
        self.matched = 0

    def advance(self, character: str) -> bool:
        """Takes one character of the text; true when it completes the string."""
        self.matched = self._longest(self.matched, character)
        if self.matched > len(self._borders):
            self._borders.append(self._longest(self._borders[-1], character))
        return self.matched == self.length

    def _longest(self, matched: int, character: str) -> int:
        """The longest beginning of the string that the text ends with, when it ended with `matched` before."""
        while matched and self._string[matched] != character:
            matched = self._borders[matched - 1]
        return matched + (self._string[matched] == character)
