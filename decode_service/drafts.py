"""From the operator's choice of a draft to the draft: which pack it needs, what it takes, how it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from decode_service.speculation.draft import Draft, NoDraft
from decode_service.speculation.model_draft import ModelDraft
from decode_service.speculation.ngram_draft import NgramDraft
from decode_service.text.tokenizer import Tokenizer
from shared.errors import ConfigurationError
from shared.kv.paged import PagedKeyValues
from shared.model.model import Model
from shared.pack.format import OUTER_FILE
from shared.pack.reader import Pack
from shared.streaming.plan import Residency

DRAFTS = ("none", "ngram", "self", "model")


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
        if draft not in ("self", "model"):
            if path is not None:
                raise ConfigurationError(
                    f"draft {draft} needs no pack; leave --draft-pack out, or choose self or model"
                )
            return None
        if path is None:
            raise ConfigurationError(f"draft {draft} needs a pack; give --draft-pack")
        pack = Pack.open(path)
        if draft == "self":
            if pack.spec != target.spec or pack.scheme.compute_dtype != target.scheme.compute_dtype:
                raise ConfigurationError(
                    f"draft self must be a copy of the target in another scheme; {path.name} is another model or "
                    f"computes in another precision ({pack.scheme.name} beside {target.scheme.name})"
                )
        elif _vocabulary(pack) != _vocabulary(target):
            raise ConfigurationError(f"draft {path.name} has another tokenizer than the target; choose another draft")
        if pack.spec.vocab_size != target.spec.vocab_size:
            raise ConfigurationError(
                f"draft {path.name} has a vocabulary of {pack.spec.vocab_size}, the target of {target.spec.vocab_size}"
            )
        same_outer = pack.manifest.files[OUTER_FILE] == target.manifest.files[OUTER_FILE]
        return cls(pack, shares_kv=draft == "self", shares_outer=same_outer)

    @property
    def weight_bytes(self) -> int:
        """Memory of its weights; a draft is never streamed."""
        outer_bytes = 0 if self.shares_outer else self.pack.outer_bytes
        return outer_bytes + self.pack.spec.layers * self.pack.layer_layout.data_bytes

    @property
    def block_bytes(self) -> int:
        """Memory that each KV block takes for the draft."""
        return 0 if self.shares_kv else PagedKeyValues.block_bytes(self.pack.spec, self.pack.scheme.compute_dtype)


def _vocabulary(pack: Pack) -> Mapping[str, int]:
    return Tokenizer(pack.tokenizer_json(), None, {}).vocabulary


def build_draft(
    draft: str, draft_pack: DraftPack | None, target: Model, target_kv: PagedKeyValues, kv_blocks: int
) -> Draft:
    """Loads what the draft needs."""
    if draft_pack is None:
        return NgramDraft() if draft == "ngram" else NoDraft()
    pack = draft_pack.pack
    everything = Residency(frozenset(range(pack.spec.layers)), slots=0)
    model = Model(pack, everything, outer=target.outer if draft_pack.shares_outer else None)
    kv = target_kv if draft_pack.shares_kv else PagedKeyValues(pack.spec, model.dtype, kv_blocks)
    return ModelDraft(model, kv, shares_target_kv=draft_pack.shares_kv)
