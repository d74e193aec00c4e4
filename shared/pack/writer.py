"""Packs a model: streams a source's tensors through a scheme into a pack, resumably and atomically."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigurationError, HeadraceError
from shared.pack.encoding import EncodedDigests, experts_file_pieces, layer_file_pieces, outer_file_pieces
from shared.pack.format import (
    CHAT_TEMPLATE_FILE,
    FORMAT_VERSION,
    MANIFEST_FILE,
    OUTER_FILE,
    TOKENIZER_FILE,
    Manifest,
    experts_file_name,
    experts_layout,
    layer_file_name,
    layer_layout,
    outer_layout,
)
from shared.pack.manifest import manifest_to_json, model_digest, pack_files
from shared.pack.reader import Pack
from shared.pack.sources.source import Source
from shared.pack.workspace import Workspace, workspace_of, write_durably
from shared.quant.schemes import Scheme

BOOKKEEPING_BYTES_PER_FILE = 4096
"""More than journal and manifest keep about one file, for the check of free space."""


@dataclass(frozen=True)
class PackProgress:
    """How far packing has come; reported before the first file and after each."""

    done_bytes: int
    """Of the pack's files, those finished by an earlier process included."""
    total_bytes: int
    resumed_bytes: int
    """Finished by an earlier process that was interrupted."""


def write_pack(
    source: Source,
    out: Path,
    scheme: Scheme,
    *,
    overwrite: bool = False,
    progress: Callable[[PackProgress], None] | None = None,
) -> Manifest:
    """Packs `source` into the folder `out`, which appears when it is complete.

    Memory holds about one layer's largest matrix. The work grows in `OUT.partial`; interrupted, the same call goes on
    where it stopped.

    Args:
        overwrite: replace a pack that `out` already is. Any other folder is never touched.

    Raises:
        ConfigurationError: `out` exists or has no name, another process packs to it, or the disk has too little room.
        UnsupportedModelError: the scheme cannot hold a matrix of this model, or would quantize one a second time.
        DataLossError: the source holds values that are not finite.
        CapacityError: the disk filled up on the way; the same call goes on where it stopped.
    """
    if not out.name:
        raise ConfigurationError(f"{out} is no name for a pack; give a folder that is not there yet")
    source.require_scheme(scheme)
    sizes = file_sizes(source, scheme)
    out.parent.mkdir(parents=True, exist_ok=True)
    with workspace_of(out) as workspace:
        _check_place(out, source, scheme, overwrite=overwrite)
        workspace.resume(_identity(source, scheme))
        report = _reporter(workspace, sizes, progress)
        check_free_space(out, bytes_to_write(sizes, workspace.finished), shutil.disk_usage(workspace.folder).free)
        report()
        for path in sizes:
            if path not in workspace.finished:
                _write_file(workspace, path, source, scheme)
                report()
        manifest = _manifest(source, scheme, workspace)
        text = manifest_to_json(manifest).encode()
        write_durably(workspace.pack / MANIFEST_FILE, [memoryview(text)])
        workspace.publish(out)
    return manifest


def file_sizes(source: Source, scheme: Scheme) -> dict[str, int]:
    """Bytes of every file that packing will write, but the manifest, by path inside the pack."""
    sizes = {OUTER_FILE: outer_layout(source.spec, scheme).file_bytes}
    layer_bytes = layer_layout(source.spec, scheme).file_bytes
    sizes |= dict.fromkeys(map(layer_file_name, range(source.spec.layers)), layer_bytes)
    if source.spec.experts:
        experts_bytes = experts_layout(source.spec, scheme).file_bytes
        sizes |= dict.fromkeys(map(experts_file_name, range(source.spec.layers)), experts_bytes)
    sizes |= {path: len(text.encode()) for path, text in _texts(source).items()}
    return {path: sizes[path] for path in pack_files(source.spec, with_chat_template=CHAT_TEMPLATE_FILE in sizes)}


def bytes_to_write(sizes: Mapping[str, int], finished: Container[str]) -> int:
    """Bytes that packing will still write: the files that are not finished, and the manifest with the journal."""
    files = sum(size for path, size in sizes.items() if path not in finished)
    return files + BOOKKEEPING_BYTES_PER_FILE * (len(sizes) + 1)


def check_free_space(place: Path, needed_bytes: int, free_bytes: int) -> None:
    """Compares what will be written with what the disk has room for.

    Raises:
        ConfigurationError: there is too little; the message says how much is missing.
    """
    if needed_bytes > free_bytes:
        raise ConfigurationError(
            f"packing writes {needed_bytes:,} bytes, but the disk of {place} has {free_bytes:,} free; "
            f"free {needed_bytes - free_bytes:,} more, or choose another place"
        )


def _check_place(out: Path, source: Source, scheme: Scheme, *, overwrite: bool) -> None:
    if not out.exists():
        return
    try:
        existing = Pack.open(out).manifest
    except HeadraceError:
        raise ConfigurationError(f"{out} exists and is no intact pack; remove it, or choose another place") from None
    if overwrite:
        return
    if (existing.source, existing.scheme) == (source.name, scheme.name):
        raise ConfigurationError(f"{out} already holds {source.name} in {scheme.name}; use it, or pass --overwrite")
    raise ConfigurationError(
        f"{out} already holds {existing.source} in {existing.scheme}; choose another place, or pass --overwrite"
    )


def _identity(source: Source, scheme: Scheme) -> dict[str, str | int]:
    """What must be the same for an interrupted packing to go on."""
    return {"format_version": FORMAT_VERSION, "scheme": scheme.name, "source": source.fingerprint}


def _write_file(workspace: Workspace, path: str, source: Source, scheme: Scheme) -> None:
    digests: EncodedDigests = {}
    expert_sha256: list[str] = []
    workspace.write(path, _pieces(path, source, scheme, digests, expert_sha256), digests, expert_sha256)


def _pieces(
    path: str, source: Source, scheme: Scheme, digests: EncodedDigests, expert_sha256: list[str]
) -> Iterator[memoryview]:
    texts = _texts(source)
    if path in texts:
        return iter([memoryview(texts[path].encode())])
    if path == OUTER_FILE:
        return outer_file_pieces(source, scheme, digests)
    for layer in range(source.spec.layers):
        if path == experts_file_name(layer):
            return experts_file_pieces(source, layer, scheme, digests, expert_sha256)
        if path == layer_file_name(layer):
            return layer_file_pieces(source, layer, scheme, digests)
    raise ValueError(f"no file of a pack is called {path}")


def _texts(source: Source) -> dict[str, str]:
    template = source.chat_template
    return {TOKENIZER_FILE: source.tokenizer_json} | ({} if template is None else {CHAT_TEMPLATE_FILE: template})


def _manifest(source: Source, scheme: Scheme, workspace: Workspace) -> Manifest:
    digests: dict[str, str] = {}
    for finished in workspace.finished.values():
        digests |= finished.encoded_digests
    with_template = source.chat_template is not None
    return Manifest(
        spec=source.spec,
        scheme=scheme.name,
        model_digest=model_digest(source.spec, scheme, digests),
        files={
            path: workspace.finished[path].record for path in pack_files(source.spec, with_chat_template=with_template)
        },
        source=source.name,
        end_token_ids=source.end_token_ids,
        special_tokens=source.special_tokens,
    )


def _reporter(
    workspace: Workspace, sizes: dict[str, int], progress: Callable[[PackProgress], None] | None
) -> Callable[[], None]:
    def done_bytes() -> int:
        return sum(sizes[path] for path in workspace.finished)

    resumed, total = done_bytes(), sum(sizes.values())

    def report() -> None:
        if progress is not None:
            progress(PackProgress(done_bytes(), total, resumed))

    return report
