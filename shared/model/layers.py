"""One decoder layer, driven by the specification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shared.model.experts import ExpertWeights, mixture
from shared.model.mlp import ACTIVATIONS, Linear, Mlp, row_chunks
from shared.model.rotary import Rotation, RotationOfRows
from shared.model.spec import AttentionRule, ModelSpec
from shared.quant.schemes import Scheme


class KeyValues(Protocol):
    """Where a pass keeps keys and values, and how its tokens attend to them."""

    def parts(self, tokens: int) -> Sequence[slice]:
        """Which of the pass's tokens attend at once, in their order: `attend` is called once for each part."""
        ...

    def attend(self, layer: int, rule: AttentionRule, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Stores the new keys and values of a part, [tokens, kv_heads, head_dim], and attends.

        Args:
            queries: rotated, [tokens, heads, head_dim].

        Returns:
            [tokens, heads, head_dim].
        """
        ...


@dataclass(frozen=True)
class LayerWeights:
    """Views of one layer's tensors, made once per buffer that holds a layer. What a model lacks is None."""

    attention_norm: Tensor | None
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_output: Linear
    attention_post_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp: Mlp | None
    """None where the layer has experts in its place."""
    router: Tensor | None
    """[experts, hidden_size]."""
    mlp_post_norm: Tensor | None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scheme: Scheme) -> LayerWeights:
        """From a layer's tensors by their stored names (`shared.pack.format`)."""

        router = tensors.get("router.weight")
        return cls(
            attention_norm=tensors.get("attention_norm.weight"),
            qkv=Linear.of(tensors, "attention.qkv", scheme),
            query_norm=tensors.get("query_norm.weight"),
            key_norm=tensors.get("key_norm.weight"),
            attention_output=Linear.of(tensors, "attention.output", scheme),
            attention_post_norm=tensors.get("attention_post_norm.weight"),
            mlp_norm=tensors.get("mlp_norm.weight"),
            mlp=Mlp.of(tensors, "mlp.", scheme) if router is None else None,
            router=router,
            mlp_post_norm=tensors.get("mlp_post_norm.weight"),
        )


def decoder_layer(
    spec: ModelSpec,
    layer: int,
    weights: LayerWeights,
    hidden: Tensor,
    rotation: RotationOfRows,
    kv: KeyValues,
    experts: ExpertWeights | None = None,
) -> None:
    """Takes all tokens of a pass through one layer, updating `hidden` [tokens, hidden_size] in place.

    What a part of the tokens works in is gone before the next part comes; its keys and values stay.

    Args:
        experts: where the layer's experts are, if it has any.
    """
    activation, residual = ACTIVATIONS[spec.activation], spec.multipliers.residual
    for part in kv.parts(len(hidden)):
        attended = kv.attend(layer, spec.attention_rules[layer], *_project(spec, weights, hidden, part, rotation))
        for rows in row_chunks(len(attended)):
            chunk = hidden[part][rows]
            output = weights.attention_output(attended[rows].flatten(1))
            chunk.add_(norm(spec, output, weights.attention_post_norm), alpha=residual)
            if weights.mlp is not None:
                output = weights.mlp(norm(spec, chunk, weights.mlp_norm), activation)
                chunk.add_(norm(spec, output, weights.mlp_post_norm), alpha=residual)
        del attended  # what the next part or the experts work in takes its place
    if weights.router is not None:
        if experts is None:
            raise ValueError("a layer with a router needs experts")
        _add_mixture(spec, layer, weights, weights.router, hidden, experts)


def norm(spec: ModelSpec, x: Tensor, weight: Tensor | None) -> Tensor:
    """Root-mean-square norm (arXiv 1910.07467), computed in float32; x itself where the model has no such norm.

    Args:
        x: [rows, features].
        weight: [size]; every `size` consecutive features are normalized together (heads, or all of them).
    """
    if weight is None:
        return x
    parts = x.float()
    if len(weight) != x.shape[1]:
        parts = parts.unflatten(1, (-1, len(weight)))
    parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True).add_(spec.norm_epsilon))
    scaled = parts.mul_(1 + weight.float()).to(x.dtype) if spec.norm_plus_one else parts.to(x.dtype).mul_(weight)
    return scaled.flatten(1)


def _add_mixture(
    spec: ModelSpec, layer: int, weights: LayerWeights, router: Tensor, hidden: Tensor, experts: ExpertWeights
) -> None:
    """Adds what the experts make of each token. All tokens are routed first, so that each expert is brought once."""
    inputs = torch.empty_like(hidden)
    for rows in row_chunks(len(hidden)):
        inputs[rows] = norm(spec, hidden[rows], weights.mlp_norm)
    outputs = mixture(spec, layer, inputs, router, experts)
    for rows in row_chunks(len(hidden)):
        output = norm(spec, outputs[rows].to(hidden.dtype), weights.mlp_post_norm)
        hidden[rows].add_(output, alpha=spec.multipliers.residual)


def _project(
    spec: ModelSpec, weights: LayerWeights, hidden: Tensor, part: slice, rotation: RotationOfRows
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, of a part of the tokens: [tokens, heads or kv_heads, head_dim] each."""
    hidden = hidden[part]
    tokens, chunks = len(hidden), list(row_chunks(len(hidden)))
    if len(chunks) == 1:
        return _project_rows(spec, weights, hidden, rotation.rows(part))
    sizes = (spec.query_size, spec.kv_size, spec.kv_size)
    queries, keys, values = (hidden.new_empty(tokens, size // spec.head_dim, spec.head_dim) for size in sizes)
    for rows in chunks:
        turn = rotation.rows(slice(part.start + rows.start, min(part.start + rows.stop, part.stop)))
        queries[rows], keys[rows], values[rows] = _project_rows(spec, weights, hidden[rows], turn)
    return queries, keys, values


def _project_rows(
    spec: ModelSpec, weights: LayerWeights, hidden: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of so few tokens that they go through the projection at once. Queries and keys are rotated together."""
    qkv = weights.qkv(norm(spec, hidden, weights.attention_norm))
    turning, values = qkv.split((spec.query_size + spec.kv_size, spec.kv_size), dim=-1)
    if weights.query_norm is not None or weights.key_norm is not None:
        queries, keys = turning.split((spec.query_size, spec.kv_size), dim=-1)
        turning = torch.cat((norm(spec, queries, weights.query_norm), norm(spec, keys, weights.key_norm)), dim=-1)
    if spec.qkv_clip is not None:
        turning, values = (part.clamp(-spec.qkv_clip, spec.qkv_clip) for part in (turning, values))
    heads = rotation.apply(turning.unflatten(-1, (-1, spec.head_dim)))
    queries, keys = heads.split((spec.heads, spec.kv_heads), dim=1)
    return queries, keys, values.unflatten(-1, (-1, spec.head_dim))
