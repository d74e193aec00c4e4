"""The tokenizer in a GGUF file's metadata, rebuilt for the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from shared.errors import UnsupportedModelError

Metadata = Mapping[str, Any]

CONTROL_TOKEN, USER_DEFINED_TOKEN = 3, 4
"""Values of `tokenizer.ggml.token_type`."""

SPECIAL_TOKEN_FIELDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Name in a chat template -> name in the metadata."""


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": _digits_then_byte_level,
}
"""How text is cut before the merges, by `tokenizer.ggml.pre`."""


def tokenizer_json(metadata: Metadata, file: str) -> str:
    """The byte-level BPE tokenizer that the metadata describes, as `tokenizer.json`.

    Raises:
        UnsupportedModelError: another kind of tokenizer or pre-tokenizer, or an incomplete one.
    """
    _check(metadata, file)
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL_TOKEN, USER_DEFINED_TOKEN):
            tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL_TOKEN, normalized=False)])
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        bos = tokens[metadata["tokenizer.ggml.bos_token_id"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    return tokenizer.to_str()


def end_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """Tokens that end an answer: end of text, and end of turn where it is another one."""
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """bos_token, eos_token … as the chat template names them."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {role: metadata.get(f"tokenizer.ggml.{name}_token_id") for role, name in SPECIAL_TOKEN_FIELDS.items()}
    return {role: tokens[token] for role, token in ids.items() if token is not None}


def _check(metadata: Metadata, file: str) -> None:
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise UnsupportedModelError(f"{file} has a {model!r} tokenizer; this version reads 'gpt2' (byte-level BPE)")
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{file} has the pre-tokenizer {pre!r}; this version knows {', '.join(PRE_TOKENIZERS)}"
        )
    for name in ("tokens", "token_type", "merges"):
        if f"tokenizer.ggml.{name}" not in metadata:
            raise UnsupportedModelError(f"{file} has no tokenizer.ggml.{name}; its tokenizer is incomplete")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    if len(set(tokens)) != len(tokens) or len(kinds) != len(tokens):
        raise UnsupportedModelError(
            f"{file}: {len(tokens)} tokens, {len(set(tokens))} of them different, with {len(kinds)} kinds; "
            "the three numbers must be the same"
        )
    for name in ("add_space_prefix", "add_eos_token"):
        if metadata.get(f"tokenizer.ggml.{name}", False):
            raise UnsupportedModelError(f"{file}: tokenizer.ggml.{name} is true; this version loads false only")
