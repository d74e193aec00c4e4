"""Which prompts are short: those that decode's next pass computes with less delay than a handoff, all requests counted.

A prompt that joins a pass makes that pass longer for everybody in it. A handoff delays nobody but its own request: by a
round trip, a wait in prefill's queue, and what each token takes. Both are measured as they happen.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

FIRST_SHORT_TOKENS = 64
"""The most missing tokens that count as short while too little was measured."""
KEPT = 0.9
"""Older handoffs count less by this factor with each new one."""
SURPRISE = 2.0
"""A handoff that takes longer than so many times the expected counts as this: a replica may have failed meanwhile."""
STALE_S = 60.0
"""After so long without a handoff nothing is known of them: prefill's queue may have become short."""

Floats = NDArray[np.float64]


class HandoffTimes:
    """What a handoff takes: a straight line through the latest ones, by least squares, that never falls."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    @property
    def is_known(self) -> bool:
        """One has ended."""
        return self._weight > 0

    def add(self, tokens: int, elapsed_s: float) -> None:
        """One has ended well."""
        if self.is_known:
            longer = max(1.0, tokens * self._weight / self._tokens)  # the slope may not have been seen yet
            elapsed_s = min(elapsed_s, SURPRISE * longer * float(self.of(tokens)))
        sums = (self._weight, self._tokens, self._seconds, self._squares, self._products)
        new = (1.0, tokens, elapsed_s, tokens**2, tokens * elapsed_s)
        self._weight, self._tokens, self._seconds, self._squares, self._products = (
            KEPT * old + one for old, one in zip(sums, new, strict=True)
        )

    def of(self, tokens: ArrayLike) -> Floats:
        """Expected seconds: a fixed part, and one for each token, neither below 0."""
        mean_tokens, mean_s = self._tokens / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean_tokens**2
        shared = self._products / self._weight - mean_tokens * mean_s
        # With handoffs of one length only there is no slope to see; rounding must not make one.
        token_s = max(0.0, shared / spread) if spread > 1e-6 * mean_tokens**2 else 0.0
        if token_s * mean_tokens > mean_s:
            token_s = mean_s / mean_tokens
        return mean_s + token_s * (np.asarray(tokens, np.float64) - mean_tokens)


class ShortPrompts:
    """Decides by measured costs. Used by the event loop; what passes cost is learned on the engine's thread."""

    def __init__(
        self,
        pass_s: Callable[[ArrayLike], Floats],
        running: Callable[[], int],
        longest: int,
        fixed: int | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins with nothing known of handoffs.

        Args:
            pass_s: expected seconds of a pass by its rows; zeros while nothing is known.
            running: sequences that a pass delays.
            longest: no prompt with more missing tokens is short: it would take more than one pass.
            fixed: what counts as short whatever is measured.
        """
        self._pass_s = pass_s
        self._running = running
        self._longest = longest
        self._fixed = fixed
        self._clock_s = clock_s
        self._handoffs = HandoffTimes()
        self._latest_s = 0.0

    def is_short(self, missing: int) -> bool:
        """Whether decode's next pass computes so many missing tokens."""
        if self._measured_nothing:
            return missing <= self._given_limit
        return bool(self._pays(np.array([missing]))[0])

    @property
    def limit(self) -> int:
        """The most missing tokens that are short now; 0: none are."""
        if self._measured_nothing:
            return self._given_limit
        lengths = np.arange(1, self._longest + 1)
        return int(lengths[self._pays(lengths)].max(initial=0))

    def handed_off(self, missing: int, elapsed_s: float) -> None:
        """A handoff of so many tokens has ended well."""
        if self._is_stale:
            self._handoffs = HandoffTimes()
        self._handoffs.add(missing, elapsed_s)
        self._latest_s = self._clock_s()

    @property
    def _is_stale(self) -> bool:
        return self._clock_s() - self._latest_s > STALE_S

    @property
    def _measured_nothing(self) -> bool:
        """Or nothing that is asked for, or still holds."""
        known = self._handoffs.is_known and not self._is_stale and bool(self._pass_s(1))
        return self._fixed is not None or not known

    @property
    def _given_limit(self) -> int:
        return min(FIRST_SHORT_TOKENS, self._longest) if self._fixed is None else self._fixed

    def _pays(self, missing: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Where all requests together wait no longer if a pass computes the prompt."""
        running = max(0, self._running() - 1)  # the one with the prompt has blocks already
        alone_s = self._pass_s(running) if running else np.zeros(())
        together_s = self._pass_s(running + missing)
        delay_s = together_s + running * (together_s - alone_s)
        within: NDArray[np.bool_] = (delay_s <= self._handoffs.of(missing)) & (missing <= self._longest)
        return within
