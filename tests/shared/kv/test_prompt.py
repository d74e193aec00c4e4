"""Keys and values of a prefill pass: each prompt's own, of the current layer."""

from __future__ import annotations

import torch

from shared.kv.layout import layout_of
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


def test_the_layout_of_a_pack_is_that_of_its_model(tiny_pack: TinyPack) -> None:
    pack = Pack.open(tiny_pack("int8", layers=3, kv_heads=1, head_dim=32))
    layout = layout_of(pack)
    assert (layout.dtype, layout.layers, layout.kv_heads, layout.head_dim) == ("bf16", 3, 1, 32)
    assert layout.token_bytes == 64
    assert layout_of(Pack.open(tiny_pack("fp32"))).dtype == "fp32"
