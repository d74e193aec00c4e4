"""Stored matrices ready to multiply, and the MLP: of a layer, or of one of its experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import gelu, silu

from shared.model.spec import Activation
from shared.quant.schemes import Scheme

ROW_CHUNK = 256
"""Rows that go through projections and MLP at once: bounds workspace whatever the batch."""

ActivationFunction = Callable[[Tensor], Tensor]

ACTIVATIONS: Mapping[Activation, ActivationFunction] = {
    "silu": silu,
    "gelu_tanh": lambda gate: gelu(gate, approximate="tanh"),
}


@dataclass(frozen=True)
class Linear:
    """A stored matrix with its optional bias, ready to multiply."""

    scheme: Scheme
    components: Mapping[str, Tensor]
    bias: Tensor | None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], name: str, scheme: Scheme) -> Linear:
        """From tensors by their stored names (`shared.pack.format`)."""
        prefix = f"{name}."
        parts = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        return cls(scheme, {key: value for key, value in parts.items() if key != "bias"}, parts.get("bias"))

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        product = self.scheme.product(x, self.components)
        return product if self.bias is None else product + self.bias


@dataclass(frozen=True)
class Mlp:
    """A gated MLP."""

    gate_up: Linear
    """Gate and up projection in one."""
    down: Linear

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], prefix: str, scheme: Scheme) -> Mlp:
        """From tensors by their stored names, which begin with `prefix`."""
        return cls(*(Linear.of(tensors, f"{prefix}{name}", scheme) for name in ("gate_up", "down")))

    def __call__(self, x: Tensor, activation: ActivationFunction) -> Tensor:
        """x [rows, hidden_size] -> [rows, hidden_size]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(activation(gate).mul_(up))


def row_chunks(rows: int) -> Iterator[slice]:
    """At most `ROW_CHUNK` rows at a time."""
    return (slice(start, start + ROW_CHUNK) for start in range(0, rows, ROW_CHUNK))
