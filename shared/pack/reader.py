"""Opens packs: the manifest at once and strictly, the weights when asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO

from torch import Tensor

from shared.errors import ConfigurationError, DataLossError
from shared.model.spec import ModelSpec
from shared.pack.format import (
    CHAT_TEMPLATE_FILE,
    MANIFEST_FILE,
    OUTER_FILE,
    TOKENIZER_FILE,
    FileLayout,
    Manifest,
    TensorEntry,
    bind,
    expert_layout,
    experts_file_name,
    experts_layout,
    layer_file_name,
    layer_layout,
    outer_layout,
)
from shared.pack.manifest import manifest_from_json
from shared.quant.candidates import Rows
from shared.quant.schemes import Scheme, scheme_named
from shared.tensors import aligned_buffer

READ_BYTES = 16 << 20


@dataclass(frozen=True)
class Pack:
    """A complete pack on disk, whose manifest is valid and whose files have the sizes it says."""

    path: Path
    manifest: Manifest
    scheme: Scheme
    layer_layout: FileLayout
    """The offset table of every layer's file."""
    outer_layout: FileLayout

    @classmethod
    def open(cls, path: Path) -> Pack:
        """Opens the pack in folder `path`. No weight is read; `verify` does that.

        Raises:
            ConfigurationError: the folder is no pack, or one of another version.
            UnsupportedModelError: it holds a model that this version does not know.
            DataLossError: a file is missing or has another size than the manifest says.
        """
        manifest = manifest_from_json(_manifest_text(path))
        scheme = scheme_named(manifest.scheme)
        pack = cls(
            path=path,
            manifest=manifest,
            scheme=scheme,
            layer_layout=layer_layout(manifest.spec, scheme),
            outer_layout=outer_layout(manifest.spec, scheme),
        )
        for file in manifest.files:
            pack._check_size(file)
        return pack

    def for_rows(self, rows: Rows) -> Pack:
        """The same pack, whose products are the fastest here for such numbers of rows."""
        return replace(self, scheme=self.scheme.for_rows(rows))

    @property
    def spec(self) -> ModelSpec:
        """What the model is."""
        return self.manifest.spec

    def layer_path(self, layer: int) -> Path:
        """The file of a layer."""
        return self.path / layer_file_name(layer)

    def layer_digest(self, layer: int) -> str:
        """SHA-256 of a layer's file, in hexadecimal."""
        return self.manifest.files[layer_file_name(layer)].sha256

    @property
    def experts_per_layer(self) -> int:
        """0 for a model without experts."""
        return self.spec.experts.count if self.spec.experts else 0

    @cached_property
    def expert_layout(self) -> FileLayout:
        """The offset table of every expert, counted from its start."""
        return expert_layout(self.spec, self.scheme)

    @cached_property
    def experts_layout(self) -> FileLayout:
        """The offset table of every file of experts."""
        return experts_layout(self.spec, self.scheme)

    def experts_path(self, layer: int) -> Path:
        """The file of a layer's experts."""
        return self.path / experts_file_name(layer)

    def experts_digest(self, layer: int) -> str:
        """SHA-256 of that file, in hexadecimal."""
        return self.manifest.files[experts_file_name(layer)].sha256

    def expert_digests(self, layer: int) -> Sequence[str]:
        """SHA-256 of each of a layer's experts, in hexadecimal."""
        return self.manifest.files[experts_file_name(layer)].expert_sha256

    @property
    def expert_bytes(self) -> int:
        """Memory of one expert; 0 for a model without experts."""
        return self.expert_layout.data_bytes if self.spec.experts else 0

    @property
    def layers_bytes(self) -> int:
        """Memory of all layers with all their experts."""
        return self.spec.layers * (self.layer_layout.data_bytes + self.experts_per_layer * self.expert_bytes)

    @property
    def outer_bytes(self) -> int:
        """Memory of the outer weights: without the embedding, where rows of it can be read on demand."""
        return self.outer_layout.data_bytes if self.spec.tied_embeddings else self.embedding.offset

    @property
    def outer_path(self) -> Path:
        """The file of the weights outside the layers."""
        return self.path / OUTER_FILE

    @property
    def embedding(self) -> TensorEntry:
        """Where the embedding lies in the outer file."""
        return self.outer_layout.entry("embedding.weight")

    def read_outer(self) -> dict[str, Tensor]:
        """Reads the weights outside the layers: `final_norm.weight`, and `embedding.weight` or `output.weight`.

        The tensors are views into one allocation. An embedding that is not tied is verified and left on disk.

        Raises:
            DataLossError: the file is not what its digest says.
        """
        layout = self.outer_layout
        with (self.path / OUTER_FILE).open("rb", buffering=0) as file:
            digest = hashlib.sha256(self._checked_header(file, OUTER_FILE, layout))
            data = aligned_buffer(self.outer_bytes)
            for part in _read_into(file, data.numpy().data):
                digest.update(part)
            for part in _read_into(file, memoryview(bytearray(READ_BYTES)), until_end=True):
                digest.update(part)
        self._check_digest(OUTER_FILE, digest.hexdigest())
        return bind(data, layout)

    def tokenizer_json(self) -> str:
        """The tokenizer, as the `tokenizers` library reads it.

        Raises:
            DataLossError: the file is not what its digest says.
        """
        return self._read_text(TOKENIZER_FILE)

    def chat_template(self) -> str | None:
        """The model's chat template (Jinja), where it has one.

        Raises:
            DataLossError: the file is not what its digest says.
        """
        return self._read_text(CHAT_TEMPLATE_FILE) if CHAT_TEMPLATE_FILE in self.manifest.files else None

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Reads every file and compares sizes, digests and offset tables with the manifest.

        Args:
            progress: called with the number of bytes that were just read.

        Raises:
            DataLossError: a file is damaged; the message names it.
        """
        for path in self.manifest.files:
            self._check_size(path)
            digest = hashlib.sha256()
            with (self.path / path).open("rb", buffering=0) as file:
                layout = self._layout_of(path)
                if layout is not None:
                    digest.update(self._checked_header(file, path, layout))
                for part in _read_into(file, memoryview(bytearray(READ_BYTES)), until_end=True):
                    digest.update(part)
                    if progress is not None:
                        progress(len(part))
            self._check_digest(path, digest.hexdigest())

    def _layout_of(self, path: str) -> FileLayout | None:
        if path == OUTER_FILE:
            return self.outer_layout
        if path.startswith("experts/"):
            return self.experts_layout
        return self.layer_layout if path.endswith(".safetensors") else None

    def _checked_header(self, file: IO[bytes], path: str, layout: FileLayout) -> bytes:
        expected = layout.header()
        found = file.read(len(expected))
        if found != expected:
            raise DataLossError(f"{self.path / path} has another offset table than its model needs; pack it again")
        return expected

    def _check_size(self, path: str) -> None:
        file, expected = self.path / path, self.manifest.files[path].size_bytes
        layout = self._layout_of(path)
        if layout is not None and expected != layout.file_bytes:
            raise DataLossError(
                f"the manifest says that {file} has {expected:,} bytes, but such a file has {layout.file_bytes:,}; "
                "pack the model again"
            )
        if not file.is_file():
            raise DataLossError(f"{file} is missing; pack the model again")
        found = file.stat().st_size
        if found != expected:
            raise DataLossError(f"{file} has {found:,} bytes, expected {expected:,}; pack the model again")

    def _check_digest(self, path: str, found: str) -> None:
        expected = self.manifest.files[path].sha256
        if found != expected:
            raise DataLossError(
                f"{self.path / path} is damaged: its SHA-256 is {found[:16]}…, expected {expected[:16]}…; "
                "pack the model again"
            )

    def _read_text(self, path: str) -> str:
        content = (self.path / path).read_bytes()
        self._check_digest(path, hashlib.sha256(content).hexdigest())
        return content.decode()


def _manifest_text(path: Path) -> str:
    try:
        return (path / MANIFEST_FILE).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigurationError(
            f"{path} is no pack: it has no {MANIFEST_FILE}; make one with `headrace pack SOURCE OUT`"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path / MANIFEST_FILE} is no text ({error}); pack the model again") from None


def _read_into(file: IO[bytes], buffer: memoryview, *, until_end: bool = False) -> Iterator[memoryview]:
    """Yields each part just read: until the buffer is full, or, going round in it, until the file ends."""
    position = 0
    while position < len(buffer):
        count = file.readinto(buffer[position : position + READ_BYTES])  # type: ignore[attr-defined]
        if not count:
            return
        yield buffer[position : position + count]
        position = 0 if until_end else position + count
