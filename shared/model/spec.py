"""What a model is, as data: everything the decoder needs to know besides the weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from shared.errors import UnsupportedModelError
from shared.model.fields import from_fields, to_fields

Activation = Literal["silu", "gelu_tanh"]
NormPlacement = Literal["before", "after", "both"]
QkNorm = Literal["none", "head", "projection"]

MOST_LAYERS = 4096
"""More than any model has; bounds what a damaged description can make us allocate."""
MOST_EXPERTS = 65_536
"""The same for the experts of all layers together."""


@dataclass(frozen=True, kw_only=True)
class LocalAttention:
    """Layers whose tokens see only the latest ones."""

    window: int
    """Tokens that a token sees, itself included."""
    layers: tuple[int, ...]
    rope_theta: float | None = None
    """Their own rotary base, without scaling; None: they rotate as other layers do."""


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Constants by which some families scale what flows through the model."""

    embedding: float = 1.0
    residual: float = 1.0
    """Of what attention and MLP add."""
    logits: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Several MLPs in each layer, of which a router chooses a few for each token (arXiv 1701.06538)."""

    count: int
    """In each layer."""
    chosen: int
    """Experts that a token goes through: those with the highest probabilities."""
    normalized: bool
    """The weights of the chosen ones, their probabilities, are scaled to a sum of 1."""
    rounded: bool
    """Weights are rounded to the compute dtype before they are used."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding of a layer: pair i turns by position / (theta^(2i / dimensions) · divisors[i])."""

    theta: float
    dimensions: int
    """Leading dimensions of a head that are rotated; the others stay as they are."""
    divisors: tuple[float, ...] = ()
    """One for each pair of dimensions; none: all are 1."""
    amplitude: float = 1.0
    """Factor of cosines and sines."""


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """How a layer's queries attend to keys."""

    scale: float
    """Factor of scores."""
    window: int | None = None
    """Tokens that a token sees, itself included; None: all before it."""
    soft_cap: float | None = None
    """Scores s become cap · tanh(s / cap) (arXiv 2408.00118)."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Mathematics of a decoder-only transformer.

    The decoder is driven by these fields alone; a new family is a mapping to them (`shared.pack.sources`), not a new
    set of layers. The defaults are those of Llama.
    """

    hidden_size: int
    intermediate_size: int
    """Of the MLP, or of each expert."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    rope_theta: float
    tied_embeddings: bool
    attention_bias: bool = False
    """q, k, v and output projections have biases."""
    mlp_bias: bool = False
    """gate, up and down projections have biases."""
    qkv_bias: bool = False
    """q, k and v projections have biases, the output projection has none."""
    activation: Activation = "silu"
    """Of the MLP's gate."""
    norms: NormPlacement = "before"
    """Attention and MLP are normalized before (their input), after (what they add), or both."""
    norm_plus_one: bool = False
    """Norms multiply by 1 + weight."""
    qk_norm: QkNorm = "none"
    """Queries and keys are normalized before rotation: each head alone, or all heads together."""
    qkv_clip: float | None = None
    """Queries, keys and values are clamped to ± this before rotation."""
    rotated_dimensions: int | None = None
    """Leading dimensions of a head that are rotated; None: all."""
    rope_divisors: tuple[float, ...] = ()
    """Frequencies are divided by these, one for each pair of rotated dimensions: what scaling of the context means."""
    rope_amplitude: float = 1.0
    unrotated_layers: tuple[int, ...] = ()
    local_attention: LocalAttention | None = None
    attention_scale: float | None = None
    """Factor of attention scores; None: 1 / √head_dim."""
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    multipliers: Multipliers = field(default_factory=Multipliers)
    experts: Experts | None = None
    """In place of every layer's MLP."""

    def __post_init__(self) -> None:
        for name in _POSITIVE_INTEGERS:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UnsupportedModelError(f"model field {name} is {value!r}; it must be positive")
        if self.layers > MOST_LAYERS:
            raise UnsupportedModelError(
                f"model field layers is {self.layers}; the most that is loaded is {MOST_LAYERS}"
            )
        for name in _POSITIVE_NUMBERS:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UnsupportedModelError(f"model field {name} is {value!r}; it must be positive")
        for name, value in vars(self.multipliers).items():
            if not 0 < value < float("inf"):
                raise UnsupportedModelError(f"model field multipliers.{name} is {value!r}; it must be positive")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UnsupportedModelError(f"model field {name} is {getattr(self, name)!r}; known are {choices}")
        self._check_attention()
        self._check_experts()

    def _check_experts(self) -> None:
        experts = self.experts
        if experts is None:
            return
        if not 1 <= experts.chosen <= experts.count:
            raise UnsupportedModelError(
                f"a token goes through {experts.chosen} of {experts.count} experts; it must be at least 1, and no more "
                "than there are"
            )
        if experts.count * self.layers > MOST_EXPERTS:
            raise UnsupportedModelError(
                f"{self.layers} layers of {experts.count} experts are more than the {MOST_EXPERTS:,} that are loaded"
            )
        if self.mlp_bias:
            raise UnsupportedModelError("experts with biases are not known")

    def _check_attention(self) -> None:
        if self.heads % self.kv_heads:
            raise UnsupportedModelError(f"{self.heads} heads cannot share {self.kv_heads} key/value heads evenly")
        rotated = self._rotated
        if rotated % 2 or not 0 < rotated <= self.head_dim:
            raise UnsupportedModelError(
                f"head_dim is {self.head_dim}, of which {rotated} dimensions are rotated; "
                "rotary embedding needs an even number"
            )
        positive = all(0 < divisor < float("inf") for divisor in self.rope_divisors)
        if self.rope_divisors and (len(self.rope_divisors) != rotated // 2 or not positive):
            raise UnsupportedModelError(f"rope_divisors must be {rotated // 2} positive numbers")
        local = self.local_attention
        if local is not None and (local.window < 1 or (local.rope_theta is not None and not local.rope_theta > 0)):
            raise UnsupportedModelError(f"local_attention is {local}; window and rope_theta must be positive")
        for name, layers in (("unrotated_layers", self.unrotated_layers), ("local_attention", self._local_layers)):
            if not all(0 <= layer < self.layers for layer in layers):
                raise UnsupportedModelError(f"{name} names layers {layers}, but the model has {self.layers}")

    @property
    def query_size(self) -> int:
        """Columns of the query projection's output."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the key (or value) projection's output."""
        return self.kv_heads * self.head_dim

    @cached_property
    def ropes(self) -> tuple[Rope | None, ...]:
        """Each layer's rotation; None where positions are not encoded."""
        common = Rope(
            theta=self.rope_theta,
            dimensions=self._rotated,
            divisors=self.rope_divisors,
            amplitude=self.rope_amplitude,
        )
        local = common
        if self.local_attention is not None and self.local_attention.rope_theta is not None:
            local = Rope(theta=self.local_attention.rope_theta, dimensions=self._rotated)
        return tuple(
            None if layer in self.unrotated_layers else local if layer in self._local_layers else common
            for layer in range(self.layers)
        )

    @cached_property
    def attention_rules(self) -> tuple[AttentionRule, ...]:
        """How each layer attends."""
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        common = AttentionRule(scale=scale, soft_cap=self.attention_soft_cap)
        window = None if self.local_attention is None else self.local_attention.window
        local = dataclasses.replace(common, window=window)
        return tuple(local if layer in self._local_layers else common for layer in range(self.layers))

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; the inverse of `from_json`.

        Fields that a plain Llama model does not need are left out, so that its digest stays what it was before they
        existed.
        """
        return to_fields(self, always=_ALWAYS_STORED)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ModelSpec:
        """From a manifest. Unknown, missing or mistyped fields are refused: they would change the model's meaning."""
        return from_fields(cls, value, "model")

    @property
    def _rotated(self) -> int:
        return self.head_dim if self.rotated_dimensions is None else self.rotated_dimensions

    @property
    def _local_layers(self) -> tuple[int, ...]:
        return () if self.local_attention is None else self.local_attention.layers


_POSITIVE_INTEGERS = (
    "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim", "vocab_size", "context_length",
)  # fmt: skip
_POSITIVE_NUMBERS = (
    "norm_epsilon", "rope_theta", "rope_amplitude", "qkv_clip", "attention_scale", "attention_soft_cap",
    "logit_soft_cap",
)  # fmt: skip
_CHOICES = {"activation": get_args(Activation), "norms": get_args(NormPlacement), "qk_norm": get_args(QkNorm)}
_ALWAYS_STORED = ("attention_bias", "mlp_bias")
