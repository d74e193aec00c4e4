"""Prompt lookup: drafts the tokens that followed the same words earlier in the sequence."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST_MATCH = 8
"""Whether more tokens than these are the same is not looked at."""


class NgramIndex:
    """Where each n-gram of one sequence last occurred.

    Extending costs the same for every token, however long the sequence is; memory grows by one entry per token and
    n-gram length. Holds accepted tokens only, so a rejected draft needs no undoing.

    Args:
        max_ngram: longest run of tokens that is looked up.
        min_ngram: shortest; shorter runs match too often to predict anything.
    """

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"n-gram lengths from {min_ngram} to {max_ngram} are not possible")
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._tokens: list[int] = []
        self._continuations: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        """Tokens in the sequence so far."""
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends accepted tokens (first of all, the prompt)."""
        for token in tokens:
            # Entered only now that a token follows it: the sequence's own end is never found as its own match.
            for length in self._lengths:
                if length <= len(self._tokens):
                    self._continuations[tuple(self._tokens[-length:])] = len(self._tokens)
            self._tokens.append(token)

    def propose(self, count: int) -> list[int]:
        """`count` tokens that followed the latest earlier occurrence of the longest suffix that has one, else none.

        A continuation that reaches the end of the sequence goes on with what it has proposed so far, so a repeating
        text is continued periodically.
        """
        start = self._start()
        if start is None:
            return []
        period = len(self._tokens) - start
        return [self._tokens[start + step % period] for step in range(count)]

    def matched(self) -> int:
        """How many tokens at the sequence's end are the same as before what is proposed, at most `LONGEST_MATCH`.

        The more, the likelier is the proposal right; 0 where there is none.
        """
        start = self._start()
        if start is None:
            return 0
        pairs = zip(reversed(self._tokens[max(0, start - LONGEST_MATCH) : start]), reversed(self._tokens), strict=False)
        return next((length for length, (there, here) in enumerate(pairs) if there != here), min(start, LONGEST_MATCH))

    def _start(self) -> int | None:
        """Where the continuation of the latest earlier occurrence of the longest suffix begins."""
        for length in self._lengths:
            if length <= len(self._tokens):
                start = self._continuations.get(tuple(self._tokens[-length:]))
                if start is not None:
                    return start
        return None
