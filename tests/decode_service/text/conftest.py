"""Tokenizers of both kinds: byte-level BPE (real and tiny), and sentencepiece-style with byte fallback."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as LibraryTokenizer

from decode_service.text.tokenizer import Tokenizer
from tests.models import smollm2_gguf, tiny_tokenizer


@pytest.fixture(scope="session")
def smollm2_reference() -> Any:
    """The tokenizer as transformers reads it from the GGUF file."""
    from transformers import AutoTokenizer

    path = smollm2_gguf()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_reference: Any) -> Tokenizer:
    return Tokenizer(
        smollm2_reference.backend_tokenizer.to_str(),
        smollm2_reference.chat_template,
        smollm2_reference.special_tokens_map,
    )


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(320).to_str(), None, {})


@pytest.fixture(scope="session")
def sentencepiece_tokenizer() -> Tokenizer:
    """Words begin with ▁, the first one's space is stripped, and what is not in the vocabulary becomes bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", *"abcdeé€", "▁a", "▁b", "ab", "▁ab", "\N{REPLACEMENT CHARACTER}"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "▁"), ("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    library = LibraryTokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    return Tokenizer(library.to_str(), None, {})
