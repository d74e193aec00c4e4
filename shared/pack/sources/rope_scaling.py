"""Scaled rotary embeddings: every published variant becomes one divisor for each pair of dimensions.

| variant  | source                                                            | here                                  |
|----------|-------------------------------------------------------------------|---------------------------------------|
| linear   | position interpolation, arXiv 2306.15595                          | one divisor for all                   |
| dynamic  | NTK-aware, changes beyond the trained context only                | none: the trained context is kept     |
| llama3   | Llama 3.1 model card and its reference implementation             | by wavelength                         |
| yarn     | arXiv 2309.00071                                                  | by number of turns; with an amplitude |
| longrope | arXiv 2402.13753, has one table up to the trained context and one | the first; the trained context is kept|
|          | beyond, which would change all earlier keys                       |                                       |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shared.pack.sources.config import Config


@dataclass(frozen=True)
class ScaledRope:
    """A rotary embedding as a `ModelSpec` describes it."""

    theta: float
    divisors: tuple[float, ...] = ()
    amplitude: float = 1.0
    context_length: int | None = None
    """Where the variant changes the context that the configuration states."""

    @property
    def spec_fields(self) -> dict[str, Any]:
        """The fields of `ModelSpec` that this gives."""
        context = {} if self.context_length is None else {"context_length": self.context_length}
        return {"rope_theta": self.theta, "rope_divisors": self.divisors, "rope_amplitude": self.amplitude} | context


@dataclass(frozen=True)
class RopeSetting:
    """What a variant's formula depends on."""

    parameters: Config
    theta: float
    dimensions: int
    context_length: int
    trained_context: int
    """`original_max_position_embeddings`."""


def scaled_rope(
    parameters: Config, theta: float, dimensions: int, context_length: int, trained_context: int | None
) -> ScaledRope:
    """The rotary embedding that `rope_parameters` (or `rope_scaling`) describe.

    Args:
        theta: base, where the parameters do not name one.
        dimensions: rotated dimensions of a head.
        context_length: `max_position_embeddings`.
        trained_context: context before scaling, where it is stated outside the parameters.

    Raises:
        UnsupportedModelError: an unknown variant, or a field that it does not have.
    """
    theta = parameters.number("rope_theta", theta)
    kind = parameters.fields.get("rope_type") or parameters.fields.get("type") or "default"
    if not isinstance(kind, str) or kind not in VARIANTS:
        parameters.refuse(f"rotary scaling {kind!r} in {parameters.place[:-1]}; known are {', '.join(VARIANTS)}")
    variant, understood = VARIANTS[kind]
    present = {name for name, value in parameters.fields.items() if value is not None}
    if unknown := sorted(present - COMMON_FIELDS - understood):
        parameters.refuse(f"{parameters.place[:-1]} has fields unknown for {kind!r}: {', '.join(unknown)}")
    trained = trained_context or parameters.integer("original_max_position_embeddings", context_length)
    try:
        return variant(RopeSetting(parameters, theta, dimensions, context_length, trained))
    except (ArithmeticError, ValueError) as error:
        parameters.refuse(f"the numbers of {parameters.place[:-1]} make no rotation of kind {kind!r} ({error})")


def _unscaled(setting: RopeSetting) -> ScaledRope:
    return ScaledRope(setting.theta)


def _linear(setting: RopeSetting) -> ScaledRope:
    return ScaledRope(setting.theta, (setting.parameters.number("factor"),) * (setting.dimensions // 2))


def _dynamic(setting: RopeSetting) -> ScaledRope:
    setting.parameters.number("factor")
    return ScaledRope(setting.theta)


def _llama3(setting: RopeSetting) -> ScaledRope:
    factor, low, high = (setting.parameters.number(f"{n}factor") for n in ("", "low_freq_", "high_freq_"))

    def divisor(frequency: float) -> float:
        turns = setting.trained_context * frequency / (2 * math.pi)
        unscaled = min(max((turns - low) / (high - low), 0.0), 1.0)
        return 1 / ((1 - unscaled) / factor + unscaled)

    return ScaledRope(setting.theta, tuple(map(divisor, _frequencies(setting))))


def _yarn(setting: RopeSetting) -> ScaledRope:
    parameters, dimensions = setting.parameters, setting.dimensions
    factor = parameters.number("factor", setting.context_length / setting.trained_context)

    def dimension_of(turns: float) -> float:
        """Where a pair makes so many turns within the trained context."""
        return dimensions * math.log(setting.trained_context / (turns * 2 * math.pi)) / (2 * math.log(setting.theta))

    low = dimension_of(parameters.number("beta_fast", 32.0))
    high = dimension_of(parameters.number("beta_slow", 1.0))
    if parameters.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dimensions - 1)
    if low == high:
        high += 0.001
    ramp = (min(max((pair - low) / (high - low), 0.0), 1.0) for pair in range(dimensions // 2))
    return ScaledRope(
        setting.theta,
        tuple(1 / (scaled / factor + 1 - scaled) for scaled in ramp),
        _yarn_amplitude(parameters, factor),
        max(setting.context_length, round(factor * setting.trained_context)),
    )


def _yarn_amplitude(parameters: Config, factor: float) -> float:
    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    stated = parameters.number_or_none("attention_factor")
    if stated is not None:
        return stated
    weight, weight_of_all = parameters.number_or_none("mscale"), parameters.number_or_none("mscale_all_dim")
    return grown(weight) / grown(weight_of_all) if weight and weight_of_all else grown(1.0)


def _longrope(setting: RopeSetting) -> ScaledRope:
    parameters, trained = setting.parameters, setting.trained_context
    parameters.numbers("long_factor", setting.dimensions // 2)
    factor = parameters.number("factor", setting.context_length / trained)
    amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return ScaledRope(
        setting.theta,
        parameters.numbers("short_factor", setting.dimensions // 2),
        parameters.number("attention_factor", amplitude),
        min(setting.context_length, trained),
    )


def _frequencies(setting: RopeSetting) -> list[float]:
    return [setting.theta ** (-2 * pair / setting.dimensions) for pair in range(setting.dimensions // 2)]


COMMON_FIELDS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})

_TRAINED = "original_max_position_embeddings"
VARIANTS: Mapping[str, tuple[Callable[[RopeSetting], ScaledRope], frozenset[str]]] = {
    "default": (_unscaled, frozenset()),
    "linear": (_linear, frozenset({"factor"})),
    "dynamic": (_dynamic, frozenset({"factor"})),
    "llama3": (_llama3, frozenset({"factor", "low_freq_factor", "high_freq_factor", _TRAINED})),
    "yarn": (
        _yarn,
        frozenset(
            {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", _TRAINED}
        ),
    ),
    "longrope": (_longrope, frozenset({"factor", "attention_factor", "short_factor", "long_factor", _TRAINED})),
}
"""Variant -> its formula, and the fields that it understands."""
