"""Checkpoints made from another one: its first layers, or the same model without an end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.models import EOS_ID


def first_layers(source: Path, out: Path, layers: int) -> Path:
    """A smaller model that often agrees with the larger one: its first layers, tokenizer and outer weights."""
    shutil.copytree(source, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    dropped = tuple(f"model.layers.{layer}." for layer in range(layers, config["num_hidden_layers"]))
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(dropped)}
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    return out


def endless(source: Path, out: Path) -> Path:
    """The same model, which never chooses its end-of-sequence token: that token's logit is 0, far from the best."""
    shutil.copytree(source, out)
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"][EOS_ID] = 0
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
