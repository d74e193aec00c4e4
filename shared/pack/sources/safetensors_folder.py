"""A Hugging Face folder with safetensors files, as a source. Weights are read one tensor at a time, never unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.errors import DataLossError, UnsupportedModelError
from shared.model.spec import ModelSpec
from shared.pack.sources.bitsandbytes_matrices import QuantizedMatrix, quantized_matrices
from shared.pack.sources.config_json import family_of_config, spec_of_config
from shared.pack.sources.expert_names import stacked_expert, stored_expert_module, stores_stacked
from shared.pack.sources.families import Family
from shared.pack.sources.refusals import is_bitsandbytes, quantized_message, refuse_folder
from shared.pack.sources.source import Shape, Source, StoredRows, check_tensors, fingerprint_of, stored_rows
from shared.pack.sources.stored_tensors import StoredTensors

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FLOATING_DTYPES = ("F32", "BF16", "F16")

OUTER_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def open_folder(folder: Path) -> Source:
    """Opens a Hugging Face folder.

    Raises:
        UnsupportedModelError: an adapter, pickled weights, another architecture, or something missing.
        DataLossError: a weight file is damaged.
    """
    name = folder.resolve().name
    refuse_folder(folder)
    config = _read_json(folder / "config.json")
    family, spec = family_of_config(config, name), spec_of_config(config, name)
    stored = StoredTensors.of(_weight_files(folder))
    quantized = _quantized(name, config, stored)
    places = _places(family, spec, stacked=stores_stacked(stored.files))
    tied_copy = {OUTER_NAMES["output.weight"]} if spec.tied_embeddings else set()
    check_tensors(
        name,
        places,
        _shapes(name, stored, quantized),
        # Old checkpoints hold the rotary frequencies, which the spec gives; tied ones may hold the embedding twice.
        ignorable=lambda tensor: tensor.endswith("rotary_emb.inv_freq") or tensor in tied_copy,
    )
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise UnsupportedModelError(f"{name} has no tokenizer.json; save the model's fast tokenizer into the folder")
    tokenizer_config = _read_json(folder / "tokenizer_config.json") if _has(folder, "tokenizer_config.json") else {}

    def read_rows(logical_name: str, rows: slice) -> Tensor:
        place = places[logical_name]
        if place.tensor in quantized:
            return quantized[place.tensor].dequantized(place.select(rows))
        return stored.rows(place.tensor, place.select(rows), place.stacked)

    def read_encoded(logical_name: str) -> dict[str, Tensor]:
        place = places[logical_name]
        return quantized[place.tensor].encoded(place.select(slice(None)))

    described_by = ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja")
    return Source(
        name=name,
        fingerprint=fingerprint_of(
            {*stored.files.values(), tokenizer, *(folder / file for file in described_by if _has(folder, file))}
        ),
        spec=spec,
        tokenizer_json=_read_text(tokenizer),
        chat_template=_chat_template(folder, tokenizer_config),
        end_token_ids=_end_token_ids(folder, config),
        special_tokens=_special_tokens(tokenizer_config),
        read_rows=read_rows,
        stored_as={
            name: quantized[place.tensor].stored_as for name, place in places.items() if place.tensor in quantized
        },
        read_encoded=read_encoded,
    )


def _weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file that holds it: as the index says, or those of the one file where there is no index."""
    if _has(folder, INDEX_FILE):
        return _indexed_files(folder)
    candidates = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if _has(folder, SINGLE_FILE):
        candidates = [folder / SINGLE_FILE]
    if len(candidates) != 1:
        found = ", ".join(path.name for path in candidates) or "none"
        raise UnsupportedModelError(
            f"{folder.resolve().name} has no {INDEX_FILE}, so one safetensors file was expected; found {found}"
        )
    return dict.fromkeys(_tensor_names(candidates[0]), candidates[0])


def _indexed_files(folder: Path) -> dict[str, Path]:
    weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedModelError(f"{INDEX_FILE} has no weight_map; the checkpoint is incomplete")
    names_in: dict[str, set[str]] = {}
    present = {path.name for path in folder.iterdir() if path.is_file()}
    for shard in sorted({str(shard) for shard in weight_map.values()}):
        if shard not in present:
            raise UnsupportedModelError(f"{INDEX_FILE} names {shard!r}, which is no file of the folder")
        names_in[shard] = set(_tensor_names(folder / shard))
    for tensor, shard in weight_map.items():
        if tensor not in names_in[shard]:
            raise DataLossError(f"{INDEX_FILE} says that {shard} holds {tensor}, but it does not; download it again")
    return {tensor: folder / shard for tensor, shard in weight_map.items()}


def _tensor_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise DataLossError(f"{path.name} is no complete safetensors file ({error}); download it again") from None


def _quantized(checkpoint: str, config: Mapping[str, Any], stored: StoredTensors) -> dict[str, QuantizedMatrix]:
    """The matrices that bitsandbytes has quantized, where the configuration says so."""
    if not is_bitsandbytes(config):
        return {}
    matrices = quantized_matrices(checkpoint, stored)
    if not matrices:
        raise UnsupportedModelError(
            quantized_message(checkpoint, "bitsandbytes", "quantization_config, but no matrix has its codes")
        )
    return matrices


def _shapes(checkpoint: str, stored: StoredTensors, quantized: Mapping[str, QuantizedMatrix]) -> dict[str, Shape]:
    """Shapes of matrices and vectors. Refuses dtypes that are codes of another quantization."""
    parts = {part for matrix in quantized.values() for part in matrix.parts}
    shapes = {name: shape for name, shape in stored.shapes.items() if name not in parts}
    for name in shapes.keys() - quantized.keys():
        if stored.dtypes[name] not in FLOATING_DTYPES:
            raise UnsupportedModelError(
                f"{checkpoint}: tensor {name} is stored as {stored.dtypes[name]}; "
                f"this version packs {', '.join(FLOATING_DTYPES)}: give the unquantized checkpoint"
            )
    return shapes | {name: matrix.shape for name, matrix in quantized.items()}


def _places(family: Family, spec: ModelSpec, *, stacked: bool) -> dict[str, StoredRows]:
    return stored_rows(
        spec,
        lambda name: _stored_name(family, name, stacked=stacked),
        stacked_expert if stacked else lambda _: None,
    )


def _stored_name(family: Family, logical_name: str, *, stacked: bool = False) -> str:
    if logical_name in OUTER_NAMES:
        return OUTER_NAMES[logical_name]
    _, layer, name = logical_name.split(".", 2)
    expert_module = stored_expert_module(family, name, stacked=stacked)
    if expert_module is not None:
        return f"model.layers.{layer}.{expert_module}"
    module, _, suffix = name.rpartition(".")
    return f"model.layers.{layer}.{family.layer_names[module]}.{suffix}"


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    if _has(folder, "chat_template.jinja"):
        return _read_text(folder / "chat_template.jinja")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named templates: the one called "default" is for plain chats
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise UnsupportedModelError(f"{folder.resolve().name}: chat_template in tokenizer_config.json is no text")
    return template


def _end_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Those that generation stops at: of generation_config.json where it names some, else of config.json."""
    generation = _read_json(folder / "generation_config.json") if _has(folder, "generation_config.json") else {}
    value = generation.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise UnsupportedModelError(f"{folder.resolve().name}: eos_token_id is {value!r}; expected token ids")
    return tuple(ids)


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for role in SPECIAL_TOKENS:
        value = tokenizer_config.get(role)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[role] = content
    return tokens


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnsupportedModelError(f"{path.name} is no UTF-8 text: {error}; download it again") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path.name} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path.name} holds no JSON object")
    return value


def _has(folder: Path, file: str) -> bool:
    return (folder / file).is_file()
