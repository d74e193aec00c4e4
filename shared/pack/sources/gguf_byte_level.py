"""Byte-level BPE as GGUF files describe it: vocabulary, merges, and the name of a rule that cuts text beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from shared.errors import UnsupportedModelError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class CuttingRule:
    """How text becomes pieces that merges do not cross."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    whole_pieces_first: bool = False
    """A piece that is a token as a whole is not built by merges."""


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _by_pattern(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


RULES: Mapping[str, CuttingRule] = {
    "gpt-2": CuttingRule(_byte_level),
    "smollm": CuttingRule(_digits_then_byte_level),
    "llama-bpe": CuttingRule(
        _by_pattern(rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{SIGNS_AND_SPACES}"), whole_pieces_first=True
    ),
    "qwen2": CuttingRule(
        _by_pattern(rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{SIGNS_AND_SPACES}"), normalizer=normalizers.NFC
    ),
}
"""By `tokenizer.ggml.pre`; as in the `tokenizer.json` of SmolLM2, Llama 3 and Qwen2."""


def byte_level_bpe(metadata: Mapping[str, Any], file: str) -> Tokenizer:
    """The tokenizer without its added tokens.

    Raises:
        UnsupportedModelError: an unknown rule, or no merges.
    """
    pre, merges = str(metadata.get("tokenizer.ggml.pre")), metadata.get("tokenizer.ggml.merges")
    if pre not in RULES:
        raise UnsupportedModelError(f"{file} has the pre-tokenizer {pre!r}; this version knows {', '.join(RULES)}")
    if merges is None:
        raise UnsupportedModelError(f"{file} has no tokenizer.ggml.merges; its tokenizer is incomplete")
    if metadata.get("tokenizer.ggml.add_space_prefix", False):
        raise UnsupportedModelError(f"{file}: tokenizer.ggml.add_space_prefix is true; this version loads false only")
    rule = RULES[pre]
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=pairs, ignore_merges=rule.whole_pieces_first))
    except Exception as error:  # the library raises nothing narrower
        reason = str(error).splitlines()[0]
        raise UnsupportedModelError(f"{file}: its merges do not fit its tokens ({reason})") from None
    tokenizer.pre_tokenizer = rule.pre_tokenizer()
    if rule.normalizer is not None:
        tokenizer.normalizer = rule.normalizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
