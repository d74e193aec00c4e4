"""Keys and values of a prefill pass: each prompt's own, of the current layer."""

from __future__ import annotations

import pytest
import torch

from shared.kv.layout import layout_of
from shared.kv.paged import PagedKeyValues
from shared.kv.prompt import PromptKeyValues
from shared.model.batch import TokenBatch
from shared.pack.reader import Pack
from shared.tensors import to_bytes
from tests.conftest import TinyPack
from tests.shared.model.runs import PagedSequences, random_tokens, resident_model


def test_what_is_handed_over_is_what_a_paged_pass_would_have_stored(tiny_pack: TinyPack) -> None:
    model = resident_model(tiny_pack("fp32"))
    layout = layout_of(Pack.open(tiny_pack("fp32")))
    prompts = [random_tokens(length, model.spec.vocab_size, length) for length in (20, 3, 50)]
    paged = PagedSequences(model, len(prompts), 50)
    paged.extend(list(enumerate(prompts)))
    received = PagedSequences(model, len(prompts), 50)
    with torch.inference_mode():
        current = model.begin(TokenBatch.of((prompt, 0) for prompt in prompts))
        for layer, weights in model.walk():
            kv = PromptKeyValues(current.batch.segments)
            current.compute(layer, weights, kv)
            for table, segment in zip(received.tables, current.batch.segments, strict=True):
                keys, values = map(to_bytes, kv.of(segment))
                assert len(keys) == len(values) == segment.count * layout.token_bytes
                received.pool.write(table, layer, 0, keys, values)
    for ours, theirs in ((paged.pool.keys, received.pool.keys), (paged.pool.values, received.pool.values)):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("part_tokens", [64, 128, 256])
@pytest.mark.parametrize("scheme", ["fp32", "bf16"])
def test_a_pass_in_parts_comes_to_the_same_to_the_last_bit(tiny_pack: TinyPack, scheme: str, part_tokens: int) -> None:
    model = resident_model(tiny_pack(scheme))
    prompts = [random_tokens(length, model.spec.vocab_size, length) for length in (20, 300, 3, 64, 129)]

    def computed(part_tokens: int, contexts: list[int]) -> list[torch.Tensor]:
        """Features, keys and values of a pass that finds the beginnings of its prompts in blocks."""
        pool = PagedKeyValues(model.spec, model.dtype, 48)
        tables = [list(range(start, start + 19)) for start in (0, 2, 21, 22, 26)]
        with torch.inference_mode():
            for known in (contexts, None):
                parts = [
                    (prompt[:context] if known else prompt[context:], 0 if known else context)
                    for prompt, context in zip(prompts, contexts, strict=True)
                ]
                kept = [index for index, (tokens, _) in enumerate(parts) if tokens]
                if not kept:
                    continue
                current = model.begin(TokenBatch.of(parts[index] for index in kept))
                kv = PromptKeyValues(current.batch.segments, pool, [tables[i] for i in kept], part_tokens)
                for layer, weights in model.walk():
                    current.compute(layer, weights, kv)
            last = [kv.of(segment, segment.context) for segment in current.batch.segments]
        return [current.hidden, pool.keys, pool.values, *(tensor for pair in last for tensor in pair)]

    for contexts in ([0] * 5, [0, 112, 0, 48, 16]):
        whole, in_parts = computed(2048, contexts), computed(part_tokens, contexts)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(in_parts, whole, strict=True))


def test_parts_end_where_chunks_of_attention_do() -> None:
    segments = TokenBatch.of([(range(20), 0), (range(300), 100), (range(5), 0)]).segments
    parts = PromptKeyValues(segments, None, [(), range(7), ()], 128).parts(325)
    assert parts == [slice(0, 112), slice(112, 240), slice(240, 325)]
    assert PromptKeyValues(segments, None, [(), range(7), ()]).parts(325) == [slice(0, 325)]


def test_the_layout_of_a_pack_is_that_of_its_model(tiny_pack: TinyPack) -> None:
    pack = Pack.open(tiny_pack("int8", layers=3, kv_heads=1, head_dim=32))
    layout = layout_of(pack)
    assert (layout.dtype, layout.layers, layout.kv_heads, layout.head_dim) == ("bf16", 3, 1, 32)
    assert layout.token_bytes == 64
    assert layout_of(Pack.open(tiny_pack("fp32"))).dtype == "fp32"
