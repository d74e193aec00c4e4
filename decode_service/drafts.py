"""From the operator's choice of a draft to the draft."""

from __future__ import annotations

from torch import Tensor

from decode_service.speculation.draft import Drafts
from decode_service.speculation.model_draft import ModelDraft
from decode_service.speculation.ngram_draft import NgramDraft
from shared.device import CPU
from shared.draft_pack import DraftPack
from shared.kv.paged import PagedKeyValues
from shared.model.mlp import Linear
from shared.model.model import Model, output_matrix
from shared.quant.candidates import DRAFT_ROWS
from shared.quant.packed import settle_matrix
from shared.quant.schemes import scheme_named
from shared.streaming.plan import Residency
from shared.tensors import on_device

ENCODED_ROWS = 4096
"""Of a matrix, at once."""


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
    outer = target.outer if draft_pack.shares_outer else on_device(pack.read_outer(), target.device)
    quantized = draft_pack.int8_output_bytes and target.device == CPU
    output = int8_linear(output_matrix(pack.spec, outer)) if quantized else None
    model = Model(pack, everything, outer=outer, output=output, copies=target.copies)
    kv = target_kv if draft_pack.shares_kv else PagedKeyValues(pack.spec, model.dtype, kv_blocks, model.device)
    return Drafts(lookup, ModelDraft(model, kv, shares_target_kv=draft_pack.shares_kv))


def int8_linear(matrix: Tensor) -> Linear:
    """A matrix [out, in] in int8, encoded in parts: in float32 all of it would take four times the memory."""
    scheme = scheme_named("int8").for_rows(DRAFT_ROWS)
    parts = [scheme.encode(rows.float()) for rows in matrix.split(ENCODED_ROWS)]
    output = Linear(scheme, settle_matrix(scheme.fuse(parts), scheme), bias=None)
    output(matrix[:1])  # what is used may have to be measured, which no request should wait for
    return output
