"""What each sequence brings to the next pass. Plain Python.

One rule covers everything: a sequence brings the tokens whose keys and values are missing. After a handoff that is its
last token; a prompt computed here brings what no block holds yet, in chunks; a preempted sequence brings what it has
lost, prompt or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from decode_service.sequence import Sequence


@dataclass(frozen=True)
class Turn:
    """One sequence's part in a pass."""

    sequence: Sequence
    tokens: list[int]
    """Tokens of the sequence whose keys and values this pass adds, in order, after the `kv_length` that exist."""
    proposal: list[int]
    """Draft tokens behind them, to be verified; none unless the pass reaches the sequence's end."""

    @property
    def reaches_end(self) -> bool:
        """The pass computes what follows the sequence's last token."""
        return self.sequence.kv_length + len(self.tokens) == len(self.sequence.tokens)

    @property
    def drafts(self) -> bool:
        """Worth a draft: only its last token is missing."""
        return self.reaches_end and len(self.tokens) == 1

    @property
    def inputs(self) -> list[int]:
        return self.tokens + self.proposal

    @property
    def scored(self) -> int:
        """How many of the last inputs need logits."""
        return 1 + len(self.proposal) if self.reaches_end else 0

    def proposing(self, proposal: list[int]) -> Turn:
        """The same turn with a proposal."""
        return replace(self, proposal=proposal)


def turns(batch: Iterable[Sequence], prompt_tokens: int) -> list[Turn]:
    """Shares a pass out: last tokens always take part, longer gaps in order of the batch, up to `prompt_tokens`."""
    shared: list[Turn] = []
    room = prompt_tokens
    for sequence in batch:
        missing = len(sequence.tokens) - sequence.kv_length
        count = missing if missing == 1 else min(missing, room)
        if count:
            shared.append(Turn(sequence, sequence.tokens[sequence.kv_length :][:count], []))
            room -= count if missing > 1 else 0
    return shared
