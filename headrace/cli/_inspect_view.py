"""How a pack is shown: tables for people, JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from math import prod
from typing import Any

from rich.console import Console
from rich.table import Table

from shared.kv.paged import BLOCK_TOKENS, PagedKeyValues
from shared.pack.format import FORMAT_VERSION, FileLayout
from shared.pack.reader import Pack
from shared.pack.sources.source import logical_shapes
from shared.pack.texts import template_facts, tokenizer_facts


def show(pack: Pack) -> None:
    """Prints the model, one layer's tensors, and the files."""
    console = Console(highlight=False, soft_wrap=True)
    for table in (_model(pack), _tensors("Tensors of a layer", pack.layer_layout), *_experts(pack), _files(pack)):
        console.print(table)


def to_json(pack: Pack) -> dict[str, Any]:
    """The same. Sizes in bytes."""
    manifest, template = pack.manifest, template_facts(pack)
    return {
        "source": manifest.source,
        "format_version": FORMAT_VERSION,
        "scheme": manifest.scheme,
        "model_digest": manifest.model_digest,
        "spec": manifest.spec.to_json(),
        "parameters": _parameters(pack),
        "total_bytes": _total_bytes(pack),
        "layer_bytes": pack.layer_layout.data_bytes,
        "expert_bytes": pack.expert_bytes,
        "kv_bytes_per_token": _kv_bytes(pack),
        "files": {
            path: {"size_bytes": record.size_bytes, "sha256": record.sha256} for path, record in manifest.files.items()
        },
        "layer_tensors": _entries(pack.layer_layout),
        "expert_tensors": _entries(pack.expert_layout) if pack.spec.experts else {},
        "end_token_ids": list(manifest.end_token_ids),
        "special_tokens": dict(manifest.special_tokens),
        "tokenizer": asdict(tokenizer_facts(pack)),
        "chat_template": None if template is None else asdict(template),
    }


def _model(pack: Pack) -> Table:
    manifest, spec = pack.manifest, pack.spec
    table = _table(f"{manifest.source} in {manifest.scheme}", "", "")
    parameters, total_bytes = _parameters(pack), _total_bytes(pack)
    rows = {
        "model digest": manifest.model_digest,
        "parameters": f"{parameters:,}, {8 * total_bytes / parameters:.2f} bits each as stored",
        "size": f"{total_bytes:,} bytes: {spec.layers} layers of {pack.layer_layout.file_bytes:,}, "
        + (f"{pack.experts_per_layer} experts in each of {pack.expert_bytes:,}, " if spec.experts else "")
        + f"{pack.outer_layout.file_bytes:,} outside them",
        "KV": f"{_kv_bytes(pack):,} bytes a token",
    }
    rows |= {name.replace("_", " "): _text(value) for name, value in spec.to_json().items()}
    rows |= {"end tokens": _text(manifest.end_token_ids)} | _texts(pack)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _texts(pack: Pack) -> dict[str, str]:
    tokens, template = tokenizer_facts(pack), template_facts(pack)
    before = f", puts {' '.join(tokens.puts_before)} before a text" if tokens.puts_before else ""
    tokenizer = f"{tokens.kind}, {tokens.vocab_size:,} tokens, {tokens.special_tokens} of them special{before}"
    if template is None:
        return {"tokenizer": tokenizer, "chat template": "none"}
    reads = f", reads {', '.join(template.variables)}" if template.variables else ""
    return {"tokenizer": tokenizer, "chat template": f"{template.characters:,} characters{reads}"}


def _experts(pack: Pack) -> list[Table]:
    return [_tensors("Tensors of an expert", pack.expert_layout)] if pack.spec.experts else []


def _entries(layout: FileLayout) -> dict[str, Any]:
    return {
        entry.name: {"dtype": _dtype(entry.dtype), "shape": list(entry.shape), "bytes": entry.size_bytes}
        for entry in layout.entries
    }


def _tensors(title: str, layout: FileLayout) -> Table:
    table = _table(title, "", "dtype", "shape", "bytes")
    for entry in layout.entries:
        shape = " × ".join(map(str, entry.shape))
        table.add_row(entry.name, _dtype(entry.dtype), shape, f"{entry.size_bytes:,}")
    return table


def _files(pack: Pack) -> Table:
    table = _table("Files", "", "bytes", "SHA-256")
    for path, record in pack.manifest.files.items():
        table.add_row(path, f"{record.size_bytes:,}", record.sha256)
    return table


def _parameters(pack: Pack) -> int:
    return sum(map(prod, logical_shapes(pack.spec).values()))


def _total_bytes(pack: Pack) -> int:
    return sum(record.size_bytes for record in pack.manifest.files.values())


def _kv_bytes(pack: Pack) -> int:
    return PagedKeyValues.block_bytes(pack.spec, pack.scheme.compute_dtype) // BLOCK_TOKENS


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _text(value: Any) -> str:
    """A field of the spec; long tables are cut."""
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 100 else f"{text[:100]} …"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=any(columns))
    for column in columns:
        table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    return table
