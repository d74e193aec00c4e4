"""GGUF files as sources."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer

from shared.errors import DataLossError, UnsupportedModelError
from shared.pack.sources import Source, open_source
from shared.pack.sources.source import logical_shapes
from tests.shared.pack.checkpoints import FULL, write_gguf

TinyModel = Callable[..., Path]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_every_kind_gives_the_values_that_the_gguf_library_dequantizes(
    kind: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    checkpoint = tiny_model(**FULL)
    expected, found = open_source(checkpoint), open_source(write_gguf(tmp_path / "m.gguf", checkpoint, kind))
    dtype = GGMLQuantizationType[kind]
    assert found.spec == expected.spec
    for name, shape in logical_shapes(found.spec).items():
        values = expected.tensor(name).numpy()
        if len(shape) == 2:
            values = np.asarray(dequantize(quantize(values, dtype), dtype), dtype=np.float32)
        assert torch.equal(found.tensor(name), torch.from_numpy(values)), name


def test_rows_read_alone_are_the_rows_of_the_whole(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = open_source(write_gguf(tmp_path / "m.gguf", tiny_model(), "Q8_0"))
    for name in ("embedding.weight", "layers.1.attention.k.weight", "final_norm.weight"):
        assert torch.equal(source.tensor(name, slice(3, 9)), source.tensor(name)[3:9])


def test_the_real_model_is_understood(smollm2_source: Source) -> None:
    source = smollm2_source
    assert (source.spec.layers, source.spec.heads, source.spec.kv_heads, source.spec.head_dim) == (30, 9, 3, 64)
    assert (source.spec.rope_theta, source.spec.norm_epsilon) == (100_000.0, 1e-5)
    assert source.spec.tied_embeddings
    assert source.end_token_ids == (2,)
    assert source.special_tokens["bos_token"] == "<|im_start|>"
    assert source.chat_template is not None
    assert "SmolLM" in source.chat_template


def test_the_end_of_turn_token_ends_an_answer_too(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(), tokenizer__ggml__eot_token_id=7)
    assert open_source(path).end_token_ids == (1, 7)


def test_a_factor_alone_means_linear_scaling(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(), llama__rope__scaling__factor=8.0)
    assert open_source(path).spec.rope_divisors == (8.0,) * 8


def test_a_beginning_token_is_added_where_the_file_asks_for_it(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(), tokenizer__ggml__add_bos_token=True)
    tokenizer = Tokenizer.from_str(open_source(path).tokenizer_json)
    plain = tokenizer.encode("report", add_special_tokens=False).ids
    assert tokenizer.encode("report").ids == [0, *plain]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"general__architecture": "mamba"}, "mamba"),
        ({"general__type": "adapter"}, "adapter"),
        ({"llama__attention__sliding_window": 128}, r"llama\.attention\.sliding_window"),
        ({"general__architecture": "bert"}, "encoder model"),
        ({"general__architecture": "clip"}, "vision tower"),
        ({"llama__rope__scaling__type": "su"}, "'su'"),
        ({"llama__rope__scaling__type": "linear"}, r"llama\.rope\.scaling\.factor"),
        ({"llama__rope__scaling__attn_factor": 2.0}, r"llama\.rope\.scaling\.attn_factor"),
        ({"llama__expert_count": 8}, "expert_count"),
        ({"llama__rope__dimension_count": 8}, "dimension_count"),
        ({"llama__attention__value_length": 32}, "value_length"),
        ({"llama__feed_forward_length": [128, 128]}, "feed_forward_length"),
        ({"llama__block_count": 5}, r"blk\.4\."),
        ({"llama__block_count": 3}, r"blk\.3\."),
        ({"llama__vocab_size": 300}, "token_embd"),
        ({"split__count": 2}, "2 parts"),
        ({"tokenizer__ggml__model": "llama"}, r"tokenizer\.ggml\.scores"),
        ({"tokenizer__ggml__model": "rwkv"}, "'rwkv' tokenizer"),
        ({"tokenizer__ggml__pre": "viking"}, "viking"),
        ({"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": 320}, "bos_token_id"),
        ({"tokenizer__ggml__add_space_prefix": True}, "add_space_prefix"),
        ({"tokenizer__chat_template": 3}, "chat_template is no text"),
        ({"omit": ("tokenizer.ggml.merges",)}, "merges"),
        ({"omit": ("llama.embedding_length",)}, "embedding_length"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    fields: dict[str, Any], named: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(), **fields)
    with pytest.raises(UnsupportedModelError, match=named):
        open_source(path)


@pytest.mark.parametrize("kept_bytes", [4, 20, 3000])
def test_a_truncated_file_is_found(kept_bytes: int, tiny_model: TinyModel, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model())
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(DataLossError, match=r"m\.gguf"):
        open_source(path)


def test_a_file_that_lacks_its_last_weights_is_found(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model())
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(DataLossError, match=r"m\.gguf"):
        open_source(path)


@pytest.mark.parametrize("offset", [0, 7])
def test_tensors_that_share_bytes_or_begin_between_boundaries_are_found(
    offset: int, tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model())
    content = bytearray(path.read_bytes())
    name = b"blk.1.attn_q.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8 + 4  # behind the number of dimensions, them, and the kind
    content[place : place + 8] = struct.pack("<Q", offset)
    path.write_bytes(content)
    with pytest.raises(DataLossError, match="lies in another tensor, or on no boundary of 32 bytes"):
        open_source(path)
