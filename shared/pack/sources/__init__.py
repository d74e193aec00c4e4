"""Checkpoints that can be packed: GGUF files and Hugging Face folders with safetensors."""

from __future__ import annotations

from pathlib import Path

from shared.errors import UnsupportedModelError
from shared.pack.sources import gguf_file, gguf_reader, safetensors_folder
from shared.pack.sources.refusals import PICKLE_SUFFIXES, pickle_message
from shared.pack.sources.source import Source

__all__ = ["SUPPORTED", "Source", "open_source"]

SUPPORTED = "a GGUF file, or a Hugging Face folder with config.json and safetensors files"


def open_source(path: Path) -> Source:
    """Opens a checkpoint, and refuses at once what this version cannot pack.

    Raises:
        UnsupportedModelError: it is not there, of another kind, or of a model that this version does not load.
    """
    if path.is_dir():
        return safetensors_folder.open_folder(path)
    if not path.is_file():
        raise UnsupportedModelError(f"there is no {path}; expected {SUPPORTED}")
    if gguf_reader.is_gguf(path):
        return gguf_file.open_gguf(path)
    if path.suffix in PICKLE_SUFFIXES:
        raise UnsupportedModelError(pickle_message(path))
    if path.suffix == ".safetensors":
        raise UnsupportedModelError(f"{path.name} is one file of a checkpoint; give the folder that holds it")
    raise UnsupportedModelError(f"{path.name} is no checkpoint that Headrace packs; expected {SUPPORTED}")
