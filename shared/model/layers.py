"""One decoder layer, driven by the specification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

from shared.model.rotary import Rotation
from shared.model.spec import ModelSpec
from shared.quant.schemes import Scheme

ROW_CHUNK = 1024
"""Rows that go through projections and MLP at once: bounds workspace whatever the batch."""


class KeyValues(Protocol):
    """Where a pass keeps keys and values, and how its tokens attend to them."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
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
    """Views of one layer's tensors, made once per buffer that holds a layer."""

    attention_norm: Tensor
    qkv: Linear
    attention_output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scheme: Scheme) -> LayerWeights:
        """From a layer's tensors by their stored names (`shared.pack.format`)."""

        def linear(name: str) -> Linear:
            prefix = f"{name}."
            parts = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            return Linear(scheme, {key: value for key, value in parts.items() if key != "bias"}, parts.get("bias"))

        return cls(
            attention_norm=tensors["attention_norm.weight"],
            qkv=linear("attention.qkv"),
            attention_output=linear("attention.output"),
            mlp_norm=tensors["mlp_norm.weight"],
            gate_up=linear("mlp.gate_up"),
            down=linear("mlp.down"),
        )


def decoder_layer(
    spec: ModelSpec, layer: int, weights: LayerWeights, hidden: Tensor, rotation: Rotation, kv: KeyValues
) -> None:
    """Takes all tokens of a pass through one layer, updating `hidden` [tokens, hidden_size] in place."""
    attended = kv.attend(layer, *_project(spec, weights, hidden, rotation))
    for rows in _row_chunks(len(hidden)):
        chunk = hidden[rows]
        chunk += weights.attention_output(attended[rows].flatten(1))
        gate, up = weights.gate_up(rms_norm(chunk, weights.mlp_norm, spec.norm_epsilon)).chunk(2, dim=-1)
        chunk += weights.down(silu(gate) * up)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32 (arXiv 1910.07467)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(x.dtype)


def _project(
    spec: ModelSpec, weights: LayerWeights, hidden: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values: [tokens, heads or kv_heads, head_dim] each."""
    tokens, sizes = len(hidden), (spec.query_size, spec.kv_size, spec.kv_size)
    queries, keys, values = (hidden.new_empty(tokens, size // spec.head_dim, spec.head_dim) for size in sizes)
    for rows in _row_chunks(tokens):
        qkv = weights.qkv(rms_norm(hidden[rows], weights.attention_norm, spec.norm_epsilon))
        q, k, v = (part.unflatten(-1, (-1, spec.head_dim)) for part in qkv.split(sizes, dim=-1))
        turn = rotation.rows(rows)
        queries[rows], keys[rows], values[rows] = turn.apply(q), turn.apply(k), v
    return queries, keys, values


def _row_chunks(tokens: int) -> Iterator[slice]:
    return (slice(start, start + ROW_CHUNK) for start in range(0, tokens, ROW_CHUNK))
