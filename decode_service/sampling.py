"""How a token is chosen from logits: argmax(processed_logits / temperature + gumbel(seed, position)).

Adding Gumbel noise to log-probabilities and taking the maximum draws exactly from the softmax (the Gumbel-max trick;
Maddison, Tarlow and Minka, "A* Sampling", 2014, section 2). The noise depends on the seed and on the place in the
sequence alone, so a draft that adds the same noise tends to choose the target's own token, and the text never depends
on the draft, the batch or the timing (drafter-invariant speculative decoding, arXiv 2408.07978).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from decode_service.shaping import Shaping
from shared.errors import DataLossError, InvalidRequestError
from shared.limits import NOISE_VECTORS

MAX_TEMPERATURE = 100.0
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How each token of one request is chosen.

    Args:
        temperature: 0 to 100; 0 is greedy.
        top_k: keep only the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches this; above 0, at most 1.
        min_p: keep only tokens at least min_p times as likely as the likeliest; 0 (keeps all) to 1.
        seed: 0 to 2^64 - 1; fixes the noise.
        shaping: what happens to logits before all that; see `decode_service.choice`.

    Raises:
        InvalidRequestError: names the field, its value and its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    shaping: Shaping = field(default_factory=Shaping)

    def __post_init__(self) -> None:
        # Written so that NaN, which compares false with everything, is refused.
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise InvalidRequestError(f"temperature is {self.temperature}; it must be from 0 to {MAX_TEMPERATURE:g}")
        if self.top_k < 0:
            raise InvalidRequestError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise InvalidRequestError(f"min_p is {self.min_p}; it must be from 0 (all tokens) to 1")
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequestError(f"seed is {self.seed}; it must be from 0 to {MAX_SEED}")

    @property
    def greedy(self) -> bool:
        """The likeliest token is always chosen; there is no noise."""
        return self.temperature == 0


def choose_token(logits: NDArray[np.float32], params: SamplingParams, position: int) -> int:
    """The one token that belongs at this place; of equally good ones the lowest id.

    Args:
        logits: [vocabulary], shaped; -inf where a token is ruled out.
        params: how to choose.
        position: index, in the whole sequence with its prompt, of the token that is being chosen.

    Raises:
        DataLossError: the logits hold NaN or infinity.
    """
    if params.greedy:
        return _finite_argmax(logits)
    scaled = _scaled(logits, params.temperature)
    noisy = scaled + gumbel_noise(params.seed, position, scaled.size)
    if params.min_p:
        noisy[scaled < math.log(params.min_p)] = -np.inf
    kept = _top_k_ids(scaled, params.top_k)
    if kept is None:
        return _best_in_nucleus(scaled, noisy, params.top_p)
    return int(kept[_best_in_nucleus(scaled[kept], noisy[kept], params.top_p)])


def processed_logits(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """Logits after temperature, top-k, top-p and min-p: [vocabulary], the best 0, -inf for dropped tokens.

    Top-p counts probabilities after top-k. Min-p compares with the likeliest token (Nguyen et al., "Turning up the
    heat", arXiv 2407.01082, section 3), so it commutes with both. Among equal logits the lower ids are kept. A
    temperature of 0 does not scale and keeps the one token that is chosen.

    Raises:
        DataLossError: the logits hold NaN or infinity.
    """
    if params.greedy:
        scaled, kept = _scaled(logits, 1.0), np.array([_finite_argmax(logits)])
    else:
        scaled = _scaled(logits, params.temperature)
        kept = np.arange(scaled.size) if (top := _top_k_ids(scaled, params.top_k)) is None else top
        kept = kept[_nucleus_ids(scaled[kept], params.top_p)]
        kept = kept[scaled[kept] >= math.log(params.min_p)] if params.min_p else kept
    processed = np.full_like(scaled, -np.inf)
    processed[kept] = scaled[kept]
    return processed


def gumbel_noise(seed: int, position: int, size: int) -> NDArray[np.float32]:
    """Standard Gumbel noise for one place in one sequence: [size], read-only, the same on every call.

    Made from the raw Philox4x64 stream (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), which
    numpy keeps stable between its versions. The seed is the key. The position is the counter's second word, so that
    positions are 2^66 numbers apart and never overlap.

    Thread safe. Keeps the latest `NOISE_VECTORS` vectors, since draft and target ask for the same ones.
    """
    return _cached_noise(seed, position, size)


@lru_cache(maxsize=NOISE_VECTORS)
def _cached_noise(seed: int, position: int, size: int) -> NDArray[np.float32]:
    raw = np.random.Philox(key=seed, counter=position << 64).random_raw(size)
    # 52 bits and a half: symmetric in (0, 1), and neither end can be reached by rounding.
    noise = (raw >> np.uint64(12)).astype(np.float64)
    noise += 0.5
    noise *= 2.0**-52
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    # The tails were computed in double precision; the sum with a logit needs no more than single.
    single = noise.astype(np.float32)
    single.setflags(write=False)
    return single


def _scaled(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    """Logits over temperature, shifted so that the best is 0: no temperature can make it overflow."""
    best = logits[_finite_argmax(logits)]
    scaled = logits.astype(np.float64)
    scaled -= float(best)
    with np.errstate(over="ignore"):
        scaled /= temperature
    return scaled


def _finite_argmax(logits: NDArray[np.float32]) -> int:
    """The lowest id with the best logit. numpy's argmax stops at the first NaN, so one look finds every fault."""
    if logits.ndim != 1 or not logits.size:
        raise ValueError(f"logits of shape {logits.shape} are not one row of a vocabulary")
    best = int(np.argmax(logits))
    if not math.isfinite(logits[best]):
        raise DataLossError(
            f"the model computed {logits[best]} as its best logit; its weights are damaged or overflow in this scheme: "
            "verify the pack's digests, or pack the model again with a wider scheme"
        )
    return best


def _top_k_ids(scaled: NDArray[np.float64], top_k: int) -> NDArray[np.intp] | None:
    """The k best ids, ascending, of equals the lowest; None for all."""
    if not 0 < top_k < scaled.size:
        return None
    cutoff = np.partition(scaled, scaled.size - top_k)[scaled.size - top_k]
    at_least = np.flatnonzero(scaled >= cutoff)
    equal = np.flatnonzero(scaled[at_least] == cutoff)
    surplus = at_least.size - top_k
    return np.delete(at_least, equal[equal.size - surplus :])


def _nucleus_ids(scaled: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """The smallest set of likeliest ids whose probability reaches top_p (arXiv 1904.09751, section 3.1)."""
    ranked = np.argsort(-scaled, kind="stable")
    if top_p == 1:
        return ranked
    reached = np.cumsum(np.exp(scaled[ranked]))
    return ranked[: int(np.searchsorted(reached, top_p * reached[-1])) + 1]


def _best_in_nucleus(scaled: NDArray[np.float64], noisy: NDArray[np.float64], top_p: float) -> int:
    """The id with the best noisy logit of those in `_nucleus_ids`, without sorting.

    An id is in the nucleus where all likelier ones together do not reach top_p. The winner usually is; if not, then
    neither is anything less likely, and the search goes on among the likelier ones.
    """
    winner = int(np.argmax(noisy))
    if top_p == 1:
        return winner
    weights = np.exp(scaled)
    reach = top_p * weights.sum()
    while True:
        likelier = scaled > scaled[winner]
        likelier[:winner] |= scaled[:winner] == scaled[winner]
        if weights[likelier].sum() < reach:
            return winner
        noisy = np.where(likelier, noisy, -np.inf)
        winner = int(np.argmax(noisy))
