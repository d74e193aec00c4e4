"""Keys and values of a prefill pass: whole prompts, and never more than the layer being computed."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.model.attention import causal_attention
from shared.model.batch import Segment
from shared.model.spec import AttentionRule


class PromptKeyValues:
    """Holds the current layer's keys and values of every prompt in the pass, until the next layer replaces them."""

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        self._segments = segments
        self._keys = self._values = torch.empty(0)

    def attend(self, layer: int, rule: AttentionRule, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Keeps the layer's keys and values, and attends within each prompt. See `shared.model.layers.KeyValues`."""
        self._keys, self._values = keys, values
        attended = torch.empty_like(queries)
        for segment in self._segments:
            rows = segment.rows
            attended[rows] = causal_attention(rule, queries[rows], keys[rows], values[rows], context=0)
        return attended

    def of(self, segment: Segment) -> tuple[Tensor, Tensor]:
        """The current layer's keys and values of one prompt, [tokens, kv_heads, head_dim] each."""
        return self._keys[segment.rows], self._values[segment.rows]
