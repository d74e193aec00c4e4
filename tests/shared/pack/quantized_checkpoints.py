"""Checkpoints that transformers has quantized with bitsandbytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

FORMS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4, double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "fp4, double": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "nf4, stored as bfloat16": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "int8": {"load_in_8bit": True},
}


def quantized_model(checkpoint: Path, form: str, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint in transformers, quantized while it is loaded; it computes in `dtype`."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(**FORMS[form], bnb_4bit_compute_dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=settings, device_map="cpu", dtype=dtype)
