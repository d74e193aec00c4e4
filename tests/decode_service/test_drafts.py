"""Which packs can draft for which, what they cost, and what the built drafts propose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_service.choice import choose_next
from decode_service.drafts import build_drafts
from decode_service.sampling import SamplingParams
from decode_service.sequence import Sequence
from decode_service.speculation.model_draft import ModelDraft
from shared.draft_pack import DraftPack
from shared.errors import ConfigurationError
from shared.kv.paged import PagedKeyValues
from shared.model.batch import TokenBatch
from shared.model.model import Model
from shared.outlet import Outlet
from shared.pack.reader import Pack
from tests.conftest import TinyCheckpoint, TinyPack, pack
from tests.end_to_end.stack import everything

BLOCKS = 8


@pytest.fixture
async def outlet() -> Any:
    return Outlet()


def sequence_of(tokens: list[int], outlet: Any, blocks: list[int], **sampling: Any) -> Sequence:
    """A sequence whose keys and values are there for all tokens but the last."""
    return Sequence(
        request_id="",
        tokens=tokens,
        prompt_tokens=len(tokens),
        max_tokens=16,
        sampling=SamplingParams(**sampling),
        output=None,  # type: ignore[arg-type]  # a draft makes no text
        outlet=outlet,
        on_admitted=lambda: None,
        blocks=blocks,
        kv_length=len(tokens) - 1,
    )


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_drafts_without_a_model_need_no_pack_and_refuse_one(tiny_pack: TinyPack, draft: str) -> None:
    target = Pack.open(tiny_pack("fp32"))
    assert DraftPack.open(draft, None, target) is None
    with pytest.raises(ConfigurationError, match="needs no pack; leave --draft-pack out"):
        DraftPack.open(draft, target.path, target)


def test_auto_goes_without_a_pack_and_takes_a_copy_and_another_model_each_as_what_it_is(tiny_pack: TinyPack) -> None:
    target = Pack.open(tiny_pack("bf16"))
    assert DraftPack.open("auto", None, target) is None
    copy, other, same_shape = (
        DraftPack.open("auto", path, target)
        for path in (tiny_pack("nf4"), tiny_pack("bf16", layers=2, seed=1), tiny_pack("nf4", seed=1))
    )
    assert copy is not None
    assert other is not None
    assert same_shape is not None
    assert (copy.shares_kv, other.shares_kv, same_shape.shares_kv) == (True, False, False)
    assert (copy.shares_outer, same_shape.shares_outer) == (True, False)


@pytest.mark.parametrize("draft", ["self", "model"])
def test_drafts_that_are_models_need_a_pack(tiny_pack: TinyPack, draft: str) -> None:
    with pytest.raises(ConfigurationError, match=f"draft {draft} needs a pack; give --draft-pack"):
        DraftPack.open(draft, None, Pack.open(tiny_pack("fp32")))


def test_a_copy_in_a_lower_scheme_shares_keys_values_and_outer_weights(tiny_pack: TinyPack) -> None:
    target = Pack.open(tiny_pack("bf16"))
    copy = DraftPack.open("self", tiny_pack("int8"), target)
    assert copy is not None
    assert (copy.shares_kv, copy.shares_outer, copy.block_bytes) == (True, True, 0)
    assert copy.weight_bytes == copy.pack.spec.layers * copy.pack.layer_layout.data_bytes


def test_a_draft_whose_output_matrix_is_a_large_part_of_it_proposes_by_one_in_int8(
    tiny_pack: TinyPack, outlet: Any
) -> None:
    shape = {"vocab": 640, "layers": 2}
    target = Pack.open(tiny_pack("bf16", **shape))
    copy = DraftPack.open("self", tiny_pack("int8", **shape), target)
    assert copy is not None
    assert copy.int8_output_bytes == 640 * 64 + 640 * 4
    assert copy.weight_bytes == copy.pack.layers_bytes + copy.int8_output_bytes
    model = Model(target, everything(target))
    kv = PagedKeyValues(target.spec, model.dtype, BLOCKS)
    draft = build_drafts("self", copy, model, kv, BLOCKS).model
    assert isinstance(draft, ModelDraft)
    hidden = torch.randn(5, 64).to(torch.bfloat16)
    with torch.inference_mode():
        ours, exact = draft.model.logits(hidden), model.logits(hidden)
    assert not torch.equal(ours, exact)
    assert torch.nn.functional.cosine_similarity(ours, exact).min() > 0.999
    assert torch.equal(model.logits(hidden), exact), "the target's own is left alone"


def test_another_model_pays_for_its_own_keys_values_and_outer_weights(tiny_pack: TinyPack) -> None:
    draft = DraftPack.open("model", tiny_pack("bf16", layers=2, seed=1), Pack.open(tiny_pack("bf16")))
    assert draft is not None
    assert (draft.shares_kv, draft.shares_outer) == (False, False)
    assert draft.block_bytes == PagedKeyValues.block_bytes(draft.pack.spec, torch.bfloat16)
    assert draft.weight_bytes == draft.pack.outer_layout.data_bytes + 2 * draft.pack.layer_layout.data_bytes


@pytest.mark.parametrize(
    ("draft", "scheme", "checkpoint", "message"),
    [
        ("self", "nf4", {}, "computes in another precision"),
        ("self", "fp32", {"layers": 2}, "is another model or"),
        ("model", "fp32", {"vocab": 384}, "has another tokenizer than the target"),
        ("auto", "fp32", {"vocab": 384}, "has another tokenizer than the target"),
    ],
)
def test_a_pack_that_does_not_fit_is_refused_with_the_reason(
    tiny_pack: TinyPack, draft: str, scheme: str, checkpoint: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DraftPack.open(draft, tiny_pack(scheme, **checkpoint), Pack.open(tiny_pack("fp32")))


def test_the_same_tokenizer_over_a_padded_vocabulary_is_refused(
    tiny_model: TinyCheckpoint, tiny_pack: TinyPack, tmp_path: Path
) -> None:
    folder = tmp_path / "padded"
    padded = tiny_model(vocab=384)
    folder.mkdir()
    for file in padded.iterdir():
        content = file.read_bytes() if file.name != "tokenizer.json" else None
        (folder / file.name).write_bytes(content or (tiny_model() / "tokenizer.json").read_bytes())
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 384
    with pytest.raises(ConfigurationError, match="has a vocabulary of 384, the target of 320"):
        DraftPack.open("model", pack(folder, tmp_path / "pack", "fp32"), Pack.open(tiny_pack("fp32")))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["self", "model"])
def test_a_draft_with_the_targets_own_weights_proposes_what_the_target_would_choose(
    tiny_pack: TinyPack, outlet: Any, kind: str, sampling: dict[str, Any]
) -> None:
    path = tiny_pack("fp32")
    opened = Pack.open(path)
    target = Model(opened, everything(opened))
    target_kv = PagedKeyValues(opened.spec, target.dtype, BLOCKS)
    drafts = build_drafts(kind, DraftPack.open(kind, path, opened), target, target_kv, BLOCKS)
    draft = drafts.model
    assert draft is not None
    assert draft.kind == kind
    assert drafts.lookup is None
    sequences = [
        sequence_of([5, 6, 7, 8, 9], outlet, [0, 3], **sampling),
        sequence_of([300 - number for number in range(20)], outlet, [1, 2, 5], **sampling),
    ]
    with torch.inference_mode():
        prefill(target, target_kv, sequences)
        missing = [draft.missing(sequence) for sequence in sequences]
        assert missing == ([1, 1] if kind == "self" else [5, 20])
        proposals = draft.propose(sequences, [4, 6])
        assert [rows for rows, _ in draft.take_passes()] == [sum(missing), 2, 2, 2, 1, 1]
        assert draft.take_passes() == []
        assert [draft.missing(sequence) for sequence in sequences] == [1, 1]
        assert [len(proposal) for proposal in proposals] == [4, 6]
        for sequence, proposal in zip(sequences, proposals, strict=True):
            assert proposal == chosen_by(target, opened, sequence, len(proposal))
        assert draft.propose(sequences, [0, 2]) == [[], proposals[1][:2]]


def prefill(target: Model, kv: PagedKeyValues, sequences: list[Sequence]) -> None:
    batch = TokenBatch.of([(sequence.tokens[:-1], 0) for sequence in sequences])
    target.forward(batch, kv.for_pass(batch.segments, [sequence.blocks for sequence in sequences]))


def chosen_by(target: Model, opened: Pack, sequence: Sequence, count: int) -> list[int]:
    """The target's choices one after another, each computed from the whole sequence."""
    tokens = list(sequence.tokens)
    for _ in range(count):
        batch = TokenBatch.of([(tokens, 0)])
        kv = PagedKeyValues(opened.spec, target.dtype, BLOCKS)
        hidden = target.forward(batch, kv.for_pass(batch.segments, [range(BLOCKS)]))
        logits = target.logits(hidden[-1:])[0].numpy()
        tokens.append(choose_next(logits, sequence.sampling, tokens, sequence.prompt_tokens))
    return tokens[len(sequence.tokens) :]


def test_prompt_lookup_follows_each_sequence_as_it_grows(tiny_pack: TinyPack, outlet: Any) -> None:
    opened = Pack.open(tiny_pack("fp32"))
    target = Model(opened, everything(opened))
    draft = build_drafts("ngram", None, target, PagedKeyValues(opened.spec, target.dtype, 1), 1).lookup
    assert draft is not None
    first = sequence_of([5, 6, 7, 8, 5, 6], outlet, [])
    second = sequence_of([5, 6, 9], outlet, [])
    assert draft.propose([first, second], [2, 2]) == [[7, 8], []]
    second.tokens += [5, 6]
    assert draft.propose([second, first], [3, 1]) == [[9, 5, 6], [7]]
