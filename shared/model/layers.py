"""One decoder layer, driven by the specification."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from shared.model.rotary import Rotation
from shared.model.spec import Activation, AttentionRule, ModelSpec
from shared.quant.schemes import Scheme

ROW_CHUNK = 256
"""Rows that go through projections and MLP at once: bounds workspace whatever the batch."""

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda gate: gelu(gate, approximate="tanh"),
}


class KeyValues(Protocol):
    """Where a pass keeps keys and values, and how its tokens attend to them."""

    def attend(self, layer: int, rule: AttentionRule, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Stores the new keys and values, [tokens, kv_heads, head_dim], and attends.

        Args:
            queries: rotated, [tokens, heads, head_dim].

        Returns:
            [tokens, heads, head_dim].
        """
        ...


@dataclass(frozen=True)
class Linear:
    """A stored matrix with its optional bias, ready to multiply."""

    scheme: Scheme
    components: Mapping[str, Tensor]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        product = self.scheme.product(x, self.components)
        return product if self.bias is None else product + self.bias


@dataclass(frozen=True)
class LayerWeights:
    """Views of one layer's tensors, made once per buffer that holds a layer. Norms that a model lacks are None."""

    attention_norm: Tensor | None
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_output: Linear
    attention_post_norm: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Linear
    down: Linear
    mlp_post_norm: Tensor | None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scheme: Scheme) -> LayerWeights:
        """From a layer's tensors by their stored names (`shared.pack.format`)."""

        def linear(name: str) -> Linear:
            prefix = f"{name}."
            parts = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            return Linear(scheme, {key: value for key, value in parts.items() if key != "bias"}, parts.get("bias"))

        return cls(
            attention_norm=tensors.get("attention_norm.weight"),
            qkv=linear("attention.qkv"),
            query_norm=tensors.get("query_norm.weight"),
            key_norm=tensors.get("key_norm.weight"),
            attention_output=linear("attention.output"),
            attention_post_norm=tensors.get("attention_post_norm.weight"),
            mlp_norm=tensors.get("mlp_norm.weight"),
            gate_up=linear("mlp.gate_up"),
            down=linear("mlp.down"),
            mlp_post_norm=tensors.get("mlp_post_norm.weight"),
        )


def decoder_layer(
    spec: ModelSpec, layer: int, weights: LayerWeights, hidden: Tensor, rotation: Rotation, kv: KeyValues
) -> None:
    """Takes all tokens of a pass through one layer, updating `hidden` [tokens, hidden_size] in place."""
    activation, residual = ACTIVATIONS[spec.activation], spec.multipliers.residual
    attended = kv.attend(layer, spec.attention_rules[layer], *_project(spec, weights, hidden, rotation))
    for rows in _row_chunks(len(hidden)):
        chunk = hidden[rows]
        output = weights.attention_output(attended[rows].flatten(1))
        chunk.add_(norm(spec, output, weights.attention_post_norm), alpha=residual)
        gate, up = weights.gate_up(norm(spec, chunk, weights.mlp_norm)).chunk(2, dim=-1)
        output = weights.down(activation(gate) * up)
        chunk.add_(norm(spec, output, weights.mlp_post_norm), alpha=residual)


def norm(spec: ModelSpec, x: Tensor, weight: Tensor | None) -> Tensor:
    """Root-mean-square norm (arXiv 1910.07467), computed in float32; x itself where the model has no such norm.

    Args:
        x: [rows, features].
        weight: [size]; every `size` consecutive features are normalized together (heads, or all of them).
    """
    if weight is None:
        return x
    parts: Tensor = x.float().unflatten(-1, (-1, len(weight)))
    parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + spec.norm_epsilon)
    scaled = (parts * (1 + weight.float())).to(x.dtype) if spec.norm_plus_one else weight * parts.to(x.dtype)
    return scaled.flatten(1)


def _project(
    spec: ModelSpec, weights: LayerWeights, hidden: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values: [tokens, heads or kv_heads, head_dim] each."""
    tokens, sizes = len(hidden), (spec.query_size, spec.kv_size, spec.kv_size)
    queries, keys, values = (hidden.new_empty(tokens, size // spec.head_dim, spec.head_dim) for size in sizes)
    for rows in _row_chunks(tokens):
        q, k, v = weights.qkv(norm(spec, hidden[rows], weights.attention_norm)).split(sizes, dim=-1)
        q, k = norm(spec, q, weights.query_norm), norm(spec, k, weights.key_norm)
        q, k, v = (part.unflatten(-1, (-1, spec.head_dim)) for part in (q, k, v))
        turn = rotation.rows(rows)
        queries[rows], keys[rows], values[rows] = turn.apply(q), turn.apply(k), v
    return queries, keys, values


def _row_chunks(tokens: int) -> Iterator[slice]:
    return (slice(start, start + ROW_CHUNK) for start in range(0, tokens, ROW_CHUNK))
