"""The pack of a draft that is a model: whether it fits its target, and what it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from shared.errors import ConfigurationError
from shared.kv.paged import PagedKeyValues
from shared.pack.format import OUTER_FILE
from shared.pack.reader import Pack
from shared.quant.candidates import DRAFT_ROWS
from shared.quant.schemes import scheme_named

DRAFTS = ("auto", "none", "ngram", "self", "model")
"""`auto`: n-grams, and the draft's pack, if one is given, where they fail and it pays."""
OUTPUT_SHARE = 1 / 4
"""Of the weights that a draft's token reads: an output matrix of at least this share is quantized for it."""


@dataclass(frozen=True)
class DraftPack:
    """The pack of a draft that is a model, checked against the target."""

    pack: Pack
    shares_kv: bool
    """A low-bit copy of the target: reads and writes the target's KV."""
    shares_outer: bool
    """Its outer weights are the target's, byte for byte."""

    @classmethod
    def open(cls, draft: str, path: Path | None, target: Pack) -> DraftPack | None:
        """Opens the draft's pack; None for drafts that need none.

        Raises:
            ConfigurationError: a pack is missing, superfluous, or does not fit the target.
        """
        if draft in ("none", "ngram"):
            if path is not None:
                raise ConfigurationError(
                    f"draft {draft} needs no pack; leave --draft-pack out, or choose auto, self or model"
                )
            return None
        if path is None:
            if draft == "auto":
                return None
            raise ConfigurationError(f"draft {draft} needs a pack; give --draft-pack")
        pack = Pack.open(path).for_rows(DRAFT_ROWS)
        same_outer = pack.manifest.files[OUTER_FILE] == target.manifest.files[OUTER_FILE]
        same_shape = pack.spec == target.spec and pack.scheme.compute_dtype == target.scheme.compute_dtype
        # A model of the same shape may be another one; the outer weights, which no scheme changes, tell a copy.
        is_copy = same_shape and same_outer if draft == "auto" else draft == "self"
        if draft == "self" and not same_shape:
            raise ConfigurationError(
                f"draft self must be a copy of the target in another scheme; {path.name} is another model or "
                f"computes in another precision ({pack.scheme.name} beside {target.scheme.name})"
            )
        if not is_copy and _vocabulary(pack) != _vocabulary(target):
            raise ConfigurationError(f"draft {path.name} has another tokenizer than the target; choose another draft")
        if pack.spec.vocab_size != target.spec.vocab_size:
            raise ConfigurationError(
                f"draft {path.name} has a vocabulary of {pack.spec.vocab_size}, the target of {target.spec.vocab_size}"
            )
        return cls(pack, shares_kv=is_copy, shares_outer=same_outer)

    @property
    def weight_bytes(self) -> int:
        """Memory of its weights; a draft is never streamed."""
        outer_bytes = 0 if self.shares_outer else self.pack.outer_bytes
        return outer_bytes + self.pack.layers_bytes + self.int8_output_bytes

    @property
    def int8_output_bytes(self) -> int:
        """Memory of its output matrix in int8, by which it proposes; 0 where it does so by the unquantized one.

        Of a small model that matrix is half of what a token reads, and int8 costs no acceptance (`docs/design.md`). Of
        a large one it is little, and the memory is worth more to the target.
        """
        spec, dtype = self.pack.spec, self.pack.scheme.compute_dtype
        unquantized_bytes = spec.vocab_size * spec.hidden_size * dtype.itemsize
        if dtype != torch.bfloat16 or unquantized_bytes < OUTPUT_SHARE * (unquantized_bytes + self.pack.layers_bytes):
            return 0
        components = scheme_named("int8").components(spec.vocab_size, spec.hidden_size).values()
        return sum(math.prod(shape) * kind.itemsize for kind, shape in components)

    @property
    def block_bytes(self) -> int:
        """Memory that each KV block takes for the draft."""
        return 0 if self.shares_kv else PagedKeyValues.block_bytes(self.pack.spec, self.pack.scheme.compute_dtype)


def _vocabulary(pack: Pack) -> Mapping[str, int]:
    return Tokenizer.from_str(pack.tokenizer_json()).get_vocab()
