"""What a model is, as data: everything the decoder needs to know besides the weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from shared.errors import UnsupportedModelError


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Mathematics of a decoder-only transformer of the Llama family.

    The decoder is driven by these fields alone; a new family is a mapping to them (`shared.pack.sources`), not a new
    set of layers.
    """

    hidden_size: int
    intermediate_size: int
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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            positive_int = field.type == "int" and (not isinstance(value, int) or value < 1)
            positive_float = field.type == "float" and not value > 0
            if positive_int or positive_float:
                raise UnsupportedModelError(f"model field {field.name} is {value!r}; it must be positive")
        if self.heads % self.kv_heads:
            raise UnsupportedModelError(f"{self.heads} heads cannot share {self.kv_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim is {self.head_dim}; rotary embedding needs an even number")

    @property
    def query_size(self) -> int:
        """Columns of the query projection's output."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the key (or value) projection's output."""
        return self.kv_heads * self.head_dim

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; the inverse of `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ModelSpec:
        """From a manifest. Unknown or missing fields are refused: they would change the model's meaning."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(value) - known):
            raise UnsupportedModelError(f"unknown model fields {unknown}; this pack needs a newer Headrace")
        try:
            return cls(**value)
        except TypeError as error:
            raise UnsupportedModelError(f"incomplete model description: {error}") from None
