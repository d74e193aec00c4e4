"""The KV layout of a pack: what its model's keys and values look like on the wire."""

from __future__ import annotations

import torch

from shared.kv.handoff import KvLayout
from shared.pack.reader import Pack

_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def layout_of(pack: Pack) -> KvLayout:
    """Keys and values travel as they are computed, in the scheme's compute dtype."""
    return KvLayout(_NAMES[pack.scheme.compute_dtype], pack.spec.layers, pack.spec.kv_heads, pack.spec.head_dim)
