"""The tokenizer in a GGUF file's metadata, rebuilt for the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from shared.errors import UnsupportedModelError
from shared.pack.sources.gguf_byte_level import byte_level_bpe
from shared.pack.sources.gguf_sentencepiece import sentencepiece_bpe

Metadata = Mapping[str, Any]

CONTROL_TOKEN, USER_DEFINED_TOKEN = 3, 4
"""Values of `tokenizer.ggml.token_type`."""

SPECIAL_TOKEN_FIELDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Name in a chat template -> name in the metadata."""

MODELS: Mapping[str, Callable[[Metadata, str], Tokenizer]] = {"gpt2": byte_level_bpe, "llama": sentencepiece_bpe}
"""By `tokenizer.ggml.model`."""

BOS_UNLESS_STATED = ("llama",)
"""Models of which files that say nothing about it want a beginning token."""


def tokenizer_json(metadata: Metadata, file: str) -> str:
    """The tokenizer that the metadata describes, as `tokenizer.json`.

    Raises:
        UnsupportedModelError: another kind of tokenizer or pre-tokenizer, or an incomplete one.
    """
    _check(metadata, file)
    model = metadata["tokenizer.ggml.model"]
    tokenizer = MODELS[model](metadata, file)
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL_TOKEN, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL_TOKEN, USER_DEFINED_TOKEN) and tokenizer.token_to_id(token) is not None
        ]
    )
    if metadata.get("tokenizer.ggml.add_bos_token", model in BOS_UNLESS_STATED):
        bos_id = _token_id(metadata, "bos")
        if bos_id is None:
            raise UnsupportedModelError(f"{file}: add_bos_token is true, but bos_token_id names no token")
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    return tokenizer.to_str()


def end_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """Tokens that end an answer: end of text, and end of turn where it is another one."""
    ids = (_token_id(metadata, name) for name in ("eos", "eot"))
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """bos_token, eos_token … as the chat template names them."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {role: _token_id(metadata, name) for role, name in SPECIAL_TOKEN_FIELDS.items()}
    return {role: tokens[token] for role, token in ids.items() if token is not None}


def _token_id(metadata: Metadata, name: str) -> int | None:
    """The id of a special token, None where the metadata names no token of the vocabulary."""
    token = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return token if isinstance(token, int) and 0 <= token < len(metadata["tokenizer.ggml.tokens"]) else None


def _check(metadata: Metadata, file: str) -> None:
    model = metadata.get("tokenizer.ggml.model")
    if model not in MODELS:
        raise UnsupportedModelError(
            f"{file} has a {model!r} tokenizer; this version reads "
            "'gpt2' (byte-level BPE) and 'llama' (sentencepiece BPE)"
        )
    for name in ("tokens", "token_type"):
        if f"tokenizer.ggml.{name}" not in metadata:
            raise UnsupportedModelError(f"{file} has no tokenizer.ggml.{name}; its tokenizer is incomplete")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    if len(set(tokens)) != len(tokens) or len(kinds) != len(tokens):
        raise UnsupportedModelError(
            f"{file}: {len(tokens)} tokens, {len(set(tokens))} of them different, with {len(kinds)} kinds; "
            "the three numbers must be the same"
        )
    for name in ("add_eos_token", "add_sep_token"):
        if metadata.get(f"tokenizer.ggml.{name}", False):
            raise UnsupportedModelError(f"{file}: tokenizer.ggml.{name} is true; this version loads false only")
