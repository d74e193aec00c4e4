"""How often experts are used, and so which of them are worth their memory.

Every pass asks for the layers in the same cyclic order, so the expert that was used last is the one that will not be
needed for longest: evicting the least recently used would evict exactly what comes next. What counts is the share of
recent passes that used an expert, for each such pass is one read that keeping it saves. An expert takes another one's
place only when its share is larger; where all are used alike, the set stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

HALF_LIFE_PASSES = 64
"""After this many passes, what happened counts half."""


class ExpertUsage:
    """Shares of passes, and the set that is kept. An expert's key is its number, counted through all layers."""

    def __init__(self, layers: int, per_layer: int, capacity: int, half_life_passes: int = HALF_LIFE_PASSES) -> None:
        """Begins with nothing kept.

        Args:
            capacity: most experts that are kept.
        """
        self._uses = np.zeros((layers, per_layer))
        self._passes = np.zeros(layers)
        self._shares = np.zeros(layers * per_layer)
        self._kept = np.zeros(layers * per_layer, dtype=bool)
        self._per_layer = per_layer
        self._room = capacity
        self._fading = 0.5 ** (1 / half_life_passes)

    def count(self, layer: int, needed: Sequence[int]) -> None:
        """One pass used these experts of a layer."""
        # Of each layer by itself, for experts of the layers before it have been counted in this pass already.
        uses = self._uses[layer]
        uses *= self._fading
        uses[list(needed)] += 1
        self._passes[layer] = self._passes[layer] * self._fading + 1
        first = layer * self._per_layer
        self._shares[first : first + self._per_layer] = uses / self._passes[layer]

    def keep(self, key: int, needed: Sequence[int]) -> int | None:
        """Decides whether an expert that is in memory now stays there.

        Args:
            needed: keys that must not make way, because they are still to be used.

        Returns:
            Whose memory is free now: the expert itself, the one whose place it takes, or nobody where there was room.
        """
        if self._room:
            self._room -= 1
            self._kept[key] = True
            return None
        shares = np.where(self._kept, self._shares, np.inf)
        shares[list(needed)] = np.inf
        least = int(shares.argmin())
        if self._shares[key] <= shares[least]:
            return key
        self._kept[least], self._kept[key] = False, True
        return least
