"""GGUF files of every architecture mean the same as the Hugging Face checkpoints that they were made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from tokenizers import Tokenizer

from shared.pack.sources import open_source
from shared.pack.sources.gguf_architectures import ARCHITECTURES
from shared.pack.sources.gguf_tokenizer import tokenizer_json
from shared.pack.sources.source import logical_shapes
from tests.models import tiny_tokenizer
from tests.shared.model.families import family_checkpoint
from tests.shared.pack.family_gguf import add_byte_level_tokenizer, write_family_gguf
from tests.shared.pack.test_gguf_tokenizer import TEXTS

CASES = {
    "llama": "Llama 2",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma 2 file",
    "gemma3": "Gemma 3 file",
}
"""Architecture -> the checkpoint that stands for it."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_spec_and_tensors_are_those_of_the_checkpoint(architecture: str, tmp_path: Path) -> None:
    checkpoint = family_checkpoint(tmp_path / "checkpoint", CASES[architecture])
    expected = open_source(checkpoint)
    found = open_source(write_family_gguf(tmp_path / "m.gguf", checkpoint, architecture))
    assert found.spec == expected.spec
    for name in logical_shapes(expected.spec):
        assert torch.allclose(found.tensor(name), expected.tensor(name), atol=2e-7), name


def test_divisors_of_rotary_frequencies_are_read(tmp_path: Path) -> None:
    checkpoint = family_checkpoint(tmp_path / "checkpoint", "Llama 3.1")
    divisors = open_source(checkpoint).spec.rope_divisors
    found = open_source(write_family_gguf(tmp_path / "m.gguf", checkpoint, "llama", divisors)).spec.rope_divisors
    assert found == pytest.approx(divisors, rel=1e-6)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_text_is_cut_as_transformers_cuts_it(pre: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_name("tiny")
    add_byte_level_tokenizer(writer, json.loads(tiny_tokenizer(400).to_str()), pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    rebuilt = _tokenizer_of(tmp_path / "m.gguf")
    for text in (text.replace("<|endoftext|>", "") for text in TEXTS):  # a token that transformers adds by itself
        pieces = reference.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert rebuilt.pre_tokenizer.pre_tokenize_str(text) == pieces
        assert rebuilt.encode(text).ids == reference(text)["input_ids"], text


def _tokenizer_of(path: Path) -> Tokenizer:
    metadata = {name: field.contents() for name, field in GGUFReader(path).fields.items()}
    return Tokenizer.from_str(tokenizer_json(metadata, path.name))
