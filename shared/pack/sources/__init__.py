"""Checkpoints that can be packed: GGUF files and Hugging Face folders with safetensors."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from shared.errors import UnsupportedModelError
from shared.pack.sources import gguf_file, gguf_reader, safetensors_folder
from shared.pack.sources.refusals import PICKLE_SUFFIXES, pickle_message
from shared.pack.sources.source import Source
from shared.sandbox import template_variables

__all__ = ["SUPPORTED", "Source", "open_source"]

SUPPORTED = "a GGUF file, or a Hugging Face folder with config.json and safetensors files"


def open_source(path: Path) -> Source:
    """Opens a checkpoint, and refuses at once what this version cannot pack.

    Raises:
        UnsupportedModelError: it is not there, of another kind, or of a model that this version does not load.
    """
    source = _opened(path)
    _check_texts(source)
    return source


def _opened(path: Path) -> Source:
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


def _check_texts(source: Source) -> None:
    """What services would refuse at their start is refused here: after packing, it would have been in vain."""
    try:
        Tokenizer.from_str(source.tokenizer_json)
    except Exception as error:  # the library raises nothing narrower
        raise UnsupportedModelError(
            f"{source.name}: its tokenizer cannot be read ({error}); save the model's fast tokenizer again"
        ) from None
    if source.chat_template is not None:
        template_variables(source.chat_template)
