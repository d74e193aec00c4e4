"""From the operator's choice of a draft to the draft."""

from __future__ import annotations

from decode_service.speculation.draft import Drafts
from decode_service.speculation.model_draft import ModelDraft
from decode_service.speculation.ngram_draft import NgramDraft
from shared.draft_pack import DraftPack
from shared.kv.paged import PagedKeyValues
from shared.model.model import Model
from shared.streaming.plan import Residency


def build_drafts(
    draft: str, draft_pack: DraftPack | None, target: Model, target_kv: PagedKeyValues, kv_blocks: int
) -> Drafts:
    """Loads what the draft needs.

    Args:
        draft: one of `shared.draft_pack.DRAFTS`.
        draft_pack: of the draft's model, where it has one.
    """
    lookup = NgramDraft() if draft in ("ngram", "auto") else None
    if draft_pack is None:
        return Drafts(lookup)
    pack = draft_pack.pack
    everything = Residency(frozenset(range(pack.spec.layers)), slots=0)
    outer = target.outer if draft_pack.shares_outer else None
    model = Model(pack, everything, outer=outer, copies=target.copies)
    kv = target_kv if draft_pack.shares_kv else PagedKeyValues(pack.spec, model.dtype, kv_blocks, model.device)
    return Drafts(lookup, ModelDraft(model, kv, shares_target_kv=draft_pack.shares_kv))
