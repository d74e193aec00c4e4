"""Sentencepiece BPE as GGUF files describe it: a vocabulary with scores, from which the merges follow.

Sentencepiece joins the two neighbours whose union has the best score, as long as there are any
(https://github.com/google/sentencepiece). So every way to cut a token into two tokens is a merge, and its rank is the
token's score. What is no token falls back to tokens of single bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from shared.errors import UnsupportedModelError

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How a space is written in tokens."""
NORMAL_TOKEN, UNKNOWN_TOKEN, USER_DEFINED_TOKEN, BYTE_TOKEN = 1, 2, 4, 6
"""Values of `tokenizer.ggml.token_type`."""
UNKNOWN = "<unk>"


def sentencepiece_bpe(metadata: Mapping[str, Any], file: str) -> Tokenizer:
    """The tokenizer without its added tokens.

    Raises:
        UnsupportedModelError: no scores, or no tokens of single bytes.
    """
    scores, kinds = metadata.get("tokenizer.ggml.scores"), metadata["tokenizer.ggml.token_type"]
    if scores is None or len(scores) != len(kinds):
        raise UnsupportedModelError(f"{file} has no tokenizer.ggml.scores of its tokens; its tokenizer is incomplete")
    if kinds.count(BYTE_TOKEN) != 256:
        raise UnsupportedModelError(
            f"{file} has {kinds.count(BYTE_TOKEN)} byte tokens; this version loads sentencepiece vocabularies with 256"
        )
    tokens = [_as_sentencepiece_writes(token) for token in metadata["tokenizer.ggml.tokens"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = UNKNOWN if UNKNOWN in vocabulary else None
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=_merges(tokens, scores, kinds, vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        decoding.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _as_sentencepiece_writes(token: str) -> str:
    """GGUF writes tokens of spaces alone, which users define, with real spaces."""
    return token.replace(" ", SPACE) if token.strip(" ") == "" else token


def _merges(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every cut of a token into two, best token first. Tokens that users define come before all others."""
    mergeable = [index for index, kind in enumerate(kinds) if kind in (NORMAL_TOKEN, USER_DEFINED_TOKEN)]
    mergeable.sort(key=lambda index: (kinds[index] != USER_DEFINED_TOKEN, -scores[index], index))
    return [pair for index in mergeable for pair in _cuts(tokens[index], vocabulary)]


def _cuts(token: str, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    cuts = ((token[:place], token[place:]) for place in range(1, len(token)))
    pairs = [(left, right) for left, right in cuts if left in vocabulary and right in vocabulary]
    return sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
