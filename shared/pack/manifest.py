"""`manifest.json` and the model digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from shared.errors import ConfigurationError
from shared.model.spec import ModelSpec
from shared.pack.format import (
    CHAT_TEMPLATE_FILE,
    FORMAT_VERSION,
    OUTER_FILE,
    TOKENIZER_FILE,
    FileRecord,
    Manifest,
    expert_prefixes,
    experts_file_name,
    has_bias,
    layer_file_name,
    matrix_shapes,
    mlp_shapes,
    norm_shapes,
    router_shapes,
)
from shared.quant.schemes import Scheme, scheme_named

SHA256 = re.compile(r"[0-9a-f]{64}")


def manifest_to_json(manifest: Manifest) -> str:
    """The text of `manifest.json`; the inverse of `manifest_from_json`."""
    value = {
        "format_version": FORMAT_VERSION,
        "model_digest": manifest.model_digest,
        "scheme": manifest.scheme,
        "source": manifest.source,
        "spec": manifest.spec.to_json(),
        "end_token_ids": list(manifest.end_token_ids),
        "special_tokens": dict(manifest.special_tokens),
        "files": {path: _record_to_json(record) for path, record in manifest.files.items()},
    }
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _record_to_json(record: FileRecord) -> dict[str, Any]:
    """A file's record as a JSON object; digests of experts only where it has experts."""
    value = dataclasses.asdict(record)
    digests = value.pop("expert_sha256")
    return value | ({"expert_sha256": list(digests)} if digests else {})


def manifest_from_json(text: str) -> Manifest:
    """Parses and validates the text of `manifest.json`.

    Raises:
        ConfigurationError: it is none, of another format version, or inconsistent.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"the manifest is no JSON ({error}); pack the model again") from None
    _require(isinstance(value, dict), "it is no object")
    version = value.get("format_version")
    if version != FORMAT_VERSION:
        raise ConfigurationError(
            f"the pack has format version {version!r}, this Headrace reads {FORMAT_VERSION}; pack the model again"
        )
    known = {"format_version", *(field.name for field in dataclasses.fields(Manifest))}
    _require(value.keys() == known, f"its fields are {sorted(value)}, expected {sorted(known)}")
    _require(isinstance(value["scheme"], str), f"scheme is {value['scheme']!r}")
    _require(isinstance(value["source"], str), f"source is {value['source']!r}")
    _require(_is_digest(value["model_digest"]), f"model_digest is {value['model_digest']!r}")
    manifest = Manifest(
        spec=ModelSpec.from_json(value["spec"]),
        scheme=scheme_named(value["scheme"]).name,
        model_digest=value["model_digest"],
        files=_files(value["files"]),
        source=value["source"],
        end_token_ids=_end_token_ids(value["end_token_ids"]),
        special_tokens=_special_tokens(value["special_tokens"]),
    )
    expected = set(pack_files(manifest.spec, with_chat_template=CHAT_TEMPLATE_FILE in manifest.files))
    _require(manifest.files.keys() == expected, f"it lists other files than its {manifest.spec.layers} layers need")
    _check_expert_digests(manifest)
    return manifest


def pack_files(spec: ModelSpec, *, with_chat_template: bool) -> list[str]:
    """Every file of a pack but the manifest, in the order in which they are written."""
    texts = [TOKENIZER_FILE] + [CHAT_TEMPLATE_FILE] * with_chat_template
    kinds = [layer_file_name, experts_file_name] if spec.experts else [layer_file_name]
    return [*texts, OUTER_FILE, *(file_name(layer) for layer in range(spec.layers) for file_name in kinds)]


def model_digest(spec: ModelSpec, scheme: Scheme, encoded_digests: Mapping[str, str]) -> str:
    """The digest that identifies a model's weights: over spec, scheme and each logical tensor's encoded values.

    Args:
        encoded_digests: logical name of every encoded tensor (`encoded_names`) -> SHA-256 of dtype, shape and values.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps(spec.to_json(), sort_keys=True).encode())
    digest.update(f"\n{scheme.name}\n".encode())
    for name in encoded_names(spec, scheme):
        digest.update(f"{name} {encoded_digests[name]}\n".encode())
    return digest.hexdigest()


def encoded_names(spec: ModelSpec, scheme: Scheme) -> Iterator[str]:
    """Every logical tensor as the scheme encodes it, in logical order: `layers.0.attention.q.SCB` …"""
    yield "embedding.weight"
    for layer in range(spec.layers):
        for norm in norm_shapes(spec):
            yield f"layers.{layer}.{norm}.weight"
        for router in router_shapes(spec):
            yield f"layers.{layer}.{router}.weight"
        for matrix, (rows, columns) in matrix_shapes(spec).items():
            for suffix in scheme.components(rows, columns):
                yield f"layers.{layer}.{matrix}.{suffix}"
            if has_bias(spec, matrix):
                yield f"layers.{layer}.{matrix}.bias"
        for expert in expert_prefixes(spec):
            for matrix, (rows, columns) in mlp_shapes(spec).items():
                for suffix in scheme.components(rows, columns):
                    yield f"layers.{layer}.{expert}.{matrix}.{suffix}"
    yield "final_norm.weight"
    if not spec.tied_embeddings:
        yield "output.weight"


def _check_expert_digests(manifest: Manifest) -> None:
    count = len(expert_prefixes(manifest.spec))
    holding = {experts_file_name(layer) for layer in range(manifest.spec.layers)} if count else set()
    for path, record in manifest.files.items():
        expected, found = count if path in holding else 0, len(record.expert_sha256)
        _require(found == expected, f"file {path!r} has digests of {found} experts, expected {expected}")


def _files(value: Any) -> dict[str, FileRecord]:
    _require(isinstance(value, dict), "files is no object")
    files = {}
    for path, record in value.items():
        parts = PurePosixPath(path).parts
        _require(bool(parts) and parts[0] != "/" and ".." not in parts, f"file {path!r} lies outside the pack")
        known = isinstance(record, dict) and record.keys() - {"expert_sha256"} == {"size_bytes", "sha256"}
        _require(known, f"file {path!r}: {record!r}")
        size, digest, of_experts = record["size_bytes"], record["sha256"], record.get("expert_sha256", [])
        _require(isinstance(size, int) and not isinstance(size, bool) and size >= 0, f"file {path!r}: size {size!r}")
        _require(_is_digest(digest), f"file {path!r}: sha256 {digest!r}")
        digests = isinstance(of_experts, list) and all(map(_is_digest, of_experts))
        _require(digests, f"file {path!r}: expert_sha256 {of_experts!r}")
        files[path] = FileRecord(size, digest, tuple(of_experts))
    return files


def _end_token_ids(value: Any) -> tuple[int, ...]:
    ids = isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    _require(ids, f"end_token_ids is {value!r}")
    return tuple(value)


def _special_tokens(value: Any) -> dict[str, str]:
    _require(
        isinstance(value, dict) and all(isinstance(token, str) for token in value.values()),
        f"special_tokens is {value!r}",
    )
    return dict(value)


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and SHA256.fullmatch(value) is not None


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ConfigurationError(f"the pack's manifest is not valid: {problem}; pack the model again")
