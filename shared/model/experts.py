"""A mixture of experts: the router's choice, and the sum of what the chosen experts make of each token.

What a token gets does not depend on the tokens beside it, nor on which experts are in memory already: its choice is
made from its own features, and the outputs of its experts are added in float32, by ascending number of the expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from shared.model.mlp import ACTIVATIONS, ROW_CHUNK, ActivationFunction, Mlp, row_chunks
from shared.model.spec import Experts, ModelSpec
from shared.quant.products import linear

ROW_COUNTS = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, ROW_CHUNK)
"""Rows of dense products with experts are padded to one of these: for each other number, kernels keep half a MiB."""
HELD_TOKENS = ROW_CHUNK
"""Up to this many tokens, every expert's output is kept until all are there, so that experts may come in any order."""


class ExpertWeights(Protocol):
    """Where a pass gets experts from."""

    def bring(self, layer: int, needed: Sequence[int], *, in_order: bool) -> Iterator[tuple[int, Mlp]]:
        """Brings each of the needed experts, once. An expert's weights are valid until the next one is asked for.

        Args:
            needed: ascending.
            in_order: bring them in that order, not as they come.
        """
        ...


@dataclass(frozen=True)
class Routing:
    """Where each token goes."""

    experts: Tensor
    """int64 [tokens, chosen], ascending for each token."""
    weights: Tensor
    """float32 [tokens, chosen]: the part that each expert's output has in the sum."""

    def groups(self, count: int) -> dict[int, Tensor]:
        """Expert -> its places in the flattened `experts`, ascending; only experts that have tokens, ascending."""
        flat = self.experts.flatten()
        sizes = flat.bincount(minlength=count).tolist()
        parts = flat.argsort(stable=True).split(sizes)
        return {expert: part for expert, part in enumerate(parts) if len(part)}


def route(experts: Experts, x: Tensor, router: Tensor) -> Routing:
    """Chooses each token's experts.

    Args:
        x: [tokens, hidden_size].
        router: [experts, hidden_size].
    """
    parts = [_route(experts, x[rows], router) for rows in row_chunks(len(x))]
    return Routing(torch.cat([part.experts for part in parts]), torch.cat([part.weights for part in parts]))


def mixture(spec: ModelSpec, layer: int, x: Tensor, router: Tensor, weights: ExpertWeights) -> Tensor:
    """The weighted sum of the outputs of each token's experts.

    Args:
        x: [tokens, hidden_size].
        router: [experts, hidden_size].

    Returns:
        float32 [tokens, hidden_size].
    """
    assert spec.experts is not None
    routing = route(spec.experts, x, router)
    add_up = _held if len(x) <= HELD_TOKENS else _at_once
    return add_up(spec, layer, x, routing, routing.groups(spec.experts.count), weights)


def _route(experts: Experts, x: Tensor, router: Tensor) -> Routing:
    probabilities = linear(x, router).softmax(dim=-1, dtype=torch.float32)
    weights, chosen = probabilities.topk(experts.chosen, dim=-1)
    if experts.normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if experts.rounded:
        weights = weights.to(x.dtype).float()
    chosen, order = chosen.sort(dim=-1)
    return Routing(chosen, weights.gather(-1, order))


def _held(
    spec: ModelSpec, layer: int, x: Tensor, routing: Routing, groups: dict[int, Tensor], weights: ExpertWeights
) -> Tensor:
    """Few tokens: outputs are kept as experts come, and added when all are there."""
    tokens, chosen = routing.experts.shape
    activation = ACTIVATIONS[spec.activation]
    outputs = x.new_empty(tokens * chosen, spec.hidden_size)
    for expert, mlp in weights.bring(layer, list(groups), in_order=False):
        places = groups[expert]
        outputs[places] = _through(mlp, x[places // chosen], activation)
    held = outputs.view(tokens, chosen, -1)
    total = torch.zeros(x.shape, dtype=torch.float32)
    for choice in range(chosen):
        total += held[:, choice].float().mul_(routing.weights[:, choice, None])
    return total


def _at_once(
    spec: ModelSpec, layer: int, x: Tensor, routing: Routing, groups: dict[int, Tensor], weights: ExpertWeights
) -> Tensor:
    """Many tokens: experts come in ascending order, and outputs are added at once."""
    activation, chosen = ACTIVATIONS[spec.activation], routing.experts.shape[1]
    share = routing.weights.flatten()
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert, mlp in weights.bring(layer, list(groups), in_order=True):
        for places in groups[expert].split(ROW_CHUNK):
            tokens = places // chosen
            total.index_add_(0, tokens, _through(mlp, x[tokens], activation).float().mul_(share[places, None]))
    return total


def _through(mlp: Mlp, x: Tensor, activation: ActivationFunction) -> Tensor:
    """An expert's output for some rows, at most `ROW_CHUNK`."""
    rows = len(x)
    if mlp.gate_up.scheme.dense:
        x = functional.pad(x, (0, 0, 0, next(count for count in ROW_COUNTS if count >= rows) - rows))
    return mlp(x, activation)[:rows]
