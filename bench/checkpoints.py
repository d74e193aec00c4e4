"""Checkpoints to measure with: the default model as a Hugging Face folder, and big models of the same function.

    python -m bench.checkpoints OUT              SmolLM2-135M-Instruct, from the package that ships it
    python -m bench.checkpoints OUT --widen 4    a model of 1.9 B parameters that computes the same function

Widening (Net2Net, arXiv 1511.05641): every hidden feature, head and intermediate unit is repeated K times. A matrix
that reads a repeated vector is split into K random parts that add up to the original; one that writes a repeated
vector repeats its rows. RMS norms are unchanged by repetition. Parameters grow by about K squared (8: 7.2 B).

The original must never draft for its own widening in a published figure: it computes the same function.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.model.spec import ModelSpec
from shared.pack.format import matrix_shapes, norm_shapes
from shared.pack.sources import open_source
from shared.pack.sources.embedded import embedded_model
from shared.pack.sources.families import LAYER_NAMES
from shared.pack.sources.safetensors_folder import OUTER_NAMES
from shared.pack.sources.source import Source

SPLIT_NOISE = 0.5
"""Size of the random differences between the parts of a split matrix, relative to its own deviation."""


def main() -> None:
    """Writes the checkpoint that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--widen", type=int, default=1, metavar="K")
    arguments = parser.parse_args()
    write_checkpoint(open_source(embedded_model("smollm2-135m")), arguments.out, arguments.widen)


def write_checkpoint(source: Source, out: Path, factor: int = 1) -> Path:
    """Writes a source as a bf16 Hugging Face folder, widened by `factor`; one file per layer, one layer in memory."""
    out.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(_shards(source, factor)):
        file_name = f"model-{number:05d}.safetensors"
        save_file({name: t.to(torch.bfloat16).contiguous() for name, t in tensors.items()}, out / file_name)
        weight_map |= dict.fromkeys(tensors, file_name)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    _write_description(source, widened_spec(source.spec, factor), out)
    return out


def write_draft(source: Source, trained: Path, out: Path) -> Path:
    """Writes a small model with the source's tokenizer and embedding as a bf16 folder.

    Args:
        trained: a safetensors file of its layers and final norm, by Hugging Face's names.
    """
    out.mkdir(parents=True, exist_ok=True)
    tensors = load_file(trained)
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    embedding = source.tensor("embedding.weight").to(torch.bfloat16)
    save_file(tensors | {OUTER_NAMES["embedding.weight"]: embedding}, out / "model.safetensors")
    _write_description(source, replace(source.spec, layers=layers), out)
    return out


def widened_spec(spec: ModelSpec, factor: int) -> ModelSpec:
    """The spec after widening; a factor of 1 changes nothing."""
    if factor == 1:
        return spec
    return replace(
        spec,
        hidden_size=spec.hidden_size * factor,
        intermediate_size=spec.intermediate_size * factor,
        heads=spec.heads * factor,
        kv_heads=spec.kv_heads * factor,
        tied_embeddings=False,
    )


def _shards(source: Source, factor: int) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def split_columns(weight: Tensor) -> Tensor:
        if factor == 1:
            return weight
        parts = torch.randn(factor, *weight.shape, generator=generator)
        parts = (parts - parts.mean(0)) * (SPLIT_NOISE * weight.std() / factor) + weight / factor
        return torch.cat(list(parts), dim=1)

    embedding = source.tensor("embedding.weight")
    outer = {"embedding.weight": embedding.repeat(1, factor)}
    outer["final_norm.weight"] = source.tensor("final_norm.weight").repeat(factor)
    if not widened_spec(source.spec, factor).tied_embeddings:
        outer["output.weight"] = split_columns(
            embedding if source.spec.tied_embeddings else source.tensor("output.weight")
        )
    yield {OUTER_NAMES[name]: tensor for name, tensor in outer.items()}
    for layer in range(source.spec.layers):
        tensors = {n: source.layer_tensor(layer, f"{n}.weight").repeat(factor) for n in norm_shapes(source.spec)}
        for matrix in matrix_shapes(source.spec):
            tensors[matrix] = split_columns(source.layer_tensor(layer, f"{matrix}.weight")).repeat(factor, 1)
        yield {f"model.layers.{layer}.{LAYER_NAMES[name]}.weight": tensor for name, tensor in tensors.items()}


def _write_description(source: Source, spec: ModelSpec, out: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": spec.norm_epsilon,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tied_embeddings,
        "eos_token_id": list(source.end_token_ids),
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "tokenizer.json").write_text(source.tokenizer_json)
    tokenizer_config = dict(source.special_tokens) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    if source.chat_template:
        (out / "chat_template.jinja").write_text(source.chat_template)


if __name__ == "__main__":
    main()
