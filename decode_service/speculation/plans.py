"""The plans for a pass's proposals, all of them weighed at once.

A plan says how long a proposal that was looked up may be, how many tokens the draft's model proposes, and who asks it:
those for whom nothing was found, or also those whom it is expected to bring further. Every sequence follows it.
"""

from __future__ import annotations

from collections.abc import Sequence as AnySequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decode_service.speculation.candidate import NOTHING, Candidate, Choice, Source
from decode_service.speculation.estimates import Costs, expected_tokens

WORTHWHILE = 1.05
"""Drafts have to promise so many times the rate without: estimates have errors, and doing without is safe."""

FIRST_LENGTH = 2
"""Tokens of the first proposal of a draft's model, at most."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Estimates:
    """What is known when a plan is chosen."""

    lookup_rates: Floats
    """[sequences]: chance that a token that was looked up is right."""
    model_rates: Floats
    """[sequences]: the same for one of the draft's model."""
    model_is_known: bool
    """It has been tried."""
    draft_costs: Costs
    pass_costs: Costs


@dataclass(frozen=True)
class Plan:
    """What each sequence brings."""

    choices: list[Choice]
    gain: float
    """Expected rate ÷ that without any proposal; 1 where that was no choice."""


def best_plan(
    candidates: AnySequence[Candidate], estimates: Estimates, lengths: range, beside: AnySequence[int] = ()
) -> Plan:
    """The plan that is expected to yield the most tokens a second.

    Args:
        lengths: of proposals, to choose from.
        beside: how many tokens each of the other sequences in the same pass brings. A long prompt is no reason to draft
            longer, though the pass takes its time anyway: whatever delays it delays what will be written after it. So
            tokens that are gained are weighed against time by the rate that all will have once there are only such
            passes.
    """
    room, found, missing, remaining = _columns(candidates)
    of_lookup = np.array(lengths if found.any() else lengths[:1])
    of_model = np.array(_model_lengths(lengths, estimates) if missing.any() else lengths[:1])
    # Axes: who asks the model, sequences, length of a lookup, length of the model's proposal.
    looked_up = np.minimum(of_lookup, found[:, None])[None, :, :, None]
    computed = np.minimum(of_model, np.where(missing > 0, room, 0)[:, None])[None, :, None, :]
    lookup_tokens = expected_tokens(estimates.lookup_rates[None, :, None, None], looked_up)
    model_tokens = expected_tokens(estimates.model_rates[None, :, None, None], computed)
    looks_up = (found > 0)[None, :, None, None] & np.ones_like(lookup_tokens >= model_tokens)
    if found.any() and missing.any():
        looks_up = np.concatenate((looks_up, looks_up & (lookup_tokens >= model_tokens)))
    tokens = np.where(looks_up, lookup_tokens, model_tokens)
    lengths_chosen = np.where(looks_up, looked_up, computed)
    asked = ~looks_up & (computed > 0)

    rows = len(candidates) + lengths_chosen.sum(1)
    draft_s = np.zeros(rows.shape)
    if missing.any():
        steps = np.where(asked, computed, 0).max(1)
        draft_s = steps * estimates.draft_costs.of(asked.sum(1))
        if (missing > 1).any():
            draft_s += _catching_up_s(missing, remaining, asked, model_tokens, estimates.draft_costs)
    total = tokens.sum(1)
    rates = total / np.maximum(draft_s + estimates.pass_costs.of(rows), 1e-9)
    without = float(rates[0, 0, 0])
    if not lengths[0]:
        rates[:, 0, 0] *= WORTHWHILE
    values = rates
    if beside:
        rate = float(rates.max()) * (1 + len(beside) / len(candidates))
        values = total - rate * (draft_s + estimates.pass_costs.of(sum(beside) + rows))
    order, lookup, model = np.unravel_index(int(values.argmax()), values.shape)
    chosen = zip(looks_up[order, :, lookup, model], lengths_chosen[order, :, lookup, model], strict=True)
    choices = [_choice(bool(looks), int(length)) for looks, length in chosen]
    return Plan(choices, float(rates[order, lookup, model]) / without if any(c.length for c in choices) else 1.0)


def _model_lengths(lengths: range, estimates: Estimates) -> range:
    """A model's first proposal is short: it tells what any later one costs, and is good for."""
    if estimates.model_is_known:
        return lengths
    return range(lengths.start, max(lengths.start, min(lengths.stop - 1, FIRST_LENGTH)) + 1)


def _columns(candidates: AnySequence[Candidate]) -> tuple[Ints, Ints, Ints, Ints]:
    """Room, tokens found, tokens missing and tokens still to come, [sequences] each."""
    rows = [(each.room, each.looked_up, each.missing, each.sequence.remaining_tokens) for each in candidates]
    room, found, missing, remaining = np.array(rows, np.int64).T
    return room, found, missing, remaining


def _catching_up_s(
    missing: Ints, remaining: Ints, asked: NDArray[np.bool_], model_tokens: Floats, draft_costs: Costs
) -> Floats:
    """Each plan's share of what the model has yet to take in: that is spent once, for all passes to come."""
    catch_up_s = np.maximum(0.0, draft_costs.of(missing) - draft_costs.of(np.ones(1)))
    catch_up_s[missing <= 1] = 0.0
    share = np.minimum(1.0, model_tokens / np.maximum(remaining, 1)[None, :, None, None])
    cost_s: Floats = np.where(asked, catch_up_s[None, :, None, None] * share, 0.0).sum(1)
    return cost_s


def _choice(looks_up: bool, length: int) -> Choice:
    return Choice(Source.LOOKUP if looks_up else Source.MODEL, length) if length else NOTHING
