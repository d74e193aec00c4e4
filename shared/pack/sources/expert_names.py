"""How checkpoints name the experts of a layer, and how they store them: one by one, or stacked.

one by one   mlp.experts.7.gate_proj.weight …                    as on the Hugging Face Hub
stacked      mlp.experts.gate_up_proj [experts, rows, columns]   as transformers holds them in memory, and may write
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from shared.pack.sources.families import Family

EXPERT_TENSOR = re.compile(r"experts\.(\d+)\.(\w+)\.weight")
"""The part of a logical name after its layer."""
STACKED = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
STACKED_MIXTURE = "mlp"
"""Every family calls it so where experts are stacked."""


def stores_stacked(tensors: Iterable[str]) -> bool:
    """Whether a checkpoint with these tensors stacks its experts."""
    return any(name.endswith(f".{STACKED_MIXTURE}.experts.{STACKED['gate']}") for name in tensors)


def stored_expert_module(family: Family, name: str, *, stacked: bool) -> str | None:
    """What a checkpoint calls a router's or expert's tensor, below its layer; None for any other tensor.

    Args:
        name: logical, below its layer: `router.weight`, `experts.7.gate.weight` …
    """
    mixture = STACKED_MIXTURE if stacked else family.mixture
    if name == "router.weight":
        return f"{mixture}.gate.weight"
    expert = EXPERT_TENSOR.fullmatch(name)
    if expert is None:
        return None
    if stacked:
        return f"{mixture}.experts.{STACKED[expert[2]]}"
    return f"{mixture}.experts.{expert[1]}.{family.expert_names[expert[2]]}.weight"


def stacked_expert(logical_name: str) -> int | None:
    """The expert that a tensor is of, counted from 0; None for any other tensor."""
    expert = EXPERT_TENSOR.fullmatch(logical_name.split(".", 2)[-1])
    return None if expert is None else int(expert[1])
