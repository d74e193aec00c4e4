"""Which tokens of a draft are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def accept(proposal: Sequence[int], choose: Callable[[int], int]) -> list[int]:
    """The tokens that one verified draft yields: at least one, at most one more than were proposed.

    The rule (drafter-invariant speculative decoding, arXiv 2408.07978, section 3): the target chooses every token
    itself, with noise that depends on seed and position alone. A proposed token is kept where it equals the target's
    choice; at the first difference the target's choice is emitted instead and the rest of the draft is dropped; after
    a draft without a difference the target's next choice comes on top. So every emitted token is the target's own
    choice after the emitted tokens before it, and the draft decides only how many of them one pass yields.

    Args:
        proposal: drafted tokens, in order; may be empty.
        choose: the target's choice for row i, that is, after the last accepted token and `proposal[:i]`; called for
            rows 0, 1, … and not past the first difference.
    """
    emitted: list[int] = []
    for row, proposed in enumerate(proposal):
        emitted.append(choose(row))
        if emitted[-1] != proposed:
            return emitted
    emitted.append(choose(len(proposal)))
    return emitted
