"""Hugging Face folders as sources."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import DataLossError, UnsupportedModelError
from shared.pack.sources import open_source
from tests.models import CHAT_TEMPLATE
from tests.shared.pack.checkpoints import FULL, edit_json

TinyModel = Callable[..., Path]


@pytest.fixture
def checkpoint(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A copy of a tiny checkpoint that a test may change."""
    return Path(shutil.copytree(tiny_model(**FULL), tmp_path / "model"))


def test_a_single_file_without_an_index_is_accepted(checkpoint: Path) -> None:
    source = open_source(checkpoint)
    stored = load_file(checkpoint / "model.safetensors")
    assert torch.equal(source.layer_tensor(2, "mlp.up.weight"), stored["model.layers.2.mlp.up_proj.weight"])
    assert torch.equal(source.layer_tensor(0, "attention.q.bias"), stored["model.layers.0.self_attn.q_proj.bias"])
    assert torch.equal(source.tensor("output.weight", slice(5, 7)), stored["lm_head.weight"][5:7])
    assert (source.name, source.end_token_ids, source.chat_template) == ("model", (1,), CHAT_TEMPLATE)
    assert source.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}


def test_shards_are_found_through_the_index_whatever_their_names(checkpoint: Path) -> None:
    names = ("embedding.weight", "layers.3.attention.output.weight")
    single = {name: open_source(checkpoint).tensor(name) for name in names}
    stored = load_file(checkpoint / "model.safetensors")
    shards = {name: "layers.safetensors" if "layers" in name else "weights-x_of_y.safetensors" for name in stored}
    for shard in set(shards.values()):
        save_file({name: tensor for name, tensor in stored.items() if shards[name] == shard}, checkpoint / shard)
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    sharded = open_source(checkpoint)
    for name in names:
        assert torch.equal(sharded.tensor(name), single[name])


def test_an_index_that_names_what_is_not_there_is_refused(checkpoint: Path) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../model.safetensors"}}))
    with pytest.raises(UnsupportedModelError, match="no file of the folder"):
        open_source(checkpoint)
    index.write_text(json.dumps({"weight_map": {"other.weight": "model.safetensors"}}))
    with pytest.raises(DataLossError, match=r"other\.weight"):
        open_source(checkpoint)


def test_half_precision_is_read_exactly(checkpoint: Path) -> None:
    stored = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    save_file(stored, checkpoint / "model.safetensors")
    found = open_source(checkpoint).tensor("embedding.weight")
    assert torch.equal(found, stored["model.embed_tokens.weight"].float())


def test_old_and_new_configurations_mean_the_same(checkpoint: Path) -> None:
    new = open_source(checkpoint).spec
    edit_json(checkpoint / "config.json", rope_parameters=None, rope_theta=10000, rope_scaling=None)
    assert open_source(checkpoint).spec == new


def test_absent_fields_have_the_defaults_of_the_llama_configuration(checkpoint: Path) -> None:
    from transformers import LlamaConfig

    spec = open_source(_minimal(checkpoint)).spec
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    assert spec.kv_heads == config.num_key_value_heads
    assert spec.head_dim == config.head_dim
    assert spec.norm_epsilon == config.rms_norm_eps
    assert spec.rope_theta == config.rope_parameters["rope_theta"]
    assert spec.tied_embeddings == config.tie_word_embeddings


def test_what_transformers_writes_is_understood(checkpoint: Path) -> None:
    from transformers import LlamaConfig

    expected = open_source(checkpoint).spec
    written = LlamaConfig.from_pretrained(checkpoint).to_dict()
    (checkpoint / "config.json").write_text(json.dumps(written))
    assert open_source(checkpoint).spec == expected


def test_generation_config_says_what_ends_an_answer(checkpoint: Path) -> None:
    edit_json(checkpoint / "generation_config.json", eos_token_id=[1, 5])
    assert open_source(checkpoint).end_token_ids == (1, 5)
    (checkpoint / "generation_config.json").unlink()
    edit_json(checkpoint / "config.json", eos_token_id=4)
    assert open_source(checkpoint).end_token_ids == (4,)


def test_a_template_file_stands_before_that_of_the_tokenizer_configuration(checkpoint: Path) -> None:
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    assert open_source(checkpoint).chat_template == "{{ messages }}"


def test_a_model_without_a_template_or_special_tokens_is_accepted(checkpoint: Path) -> None:
    (checkpoint / "tokenizer_config.json").unlink()
    source = open_source(checkpoint)
    assert source.chat_template is None
    assert source.special_tokens == {}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "qwen2_moe"}, "qwen2_moe"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attention_chunk_size": 64, "no_rope_layers": [1]}, "attention_chunk_size, no_rope_layers"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"rope_scaling\.low_freq_factor"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor"),
        ({"rope_scaling": {"type": "proportional"}}, "proportional"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}}, "'linear': beta_fast"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mscale": 2}}, "mscale"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": [1e4]}, "rope_parameters is"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_hidden_layers": 5}, r"model\.layers\.4\."),
        ({"num_hidden_layers": 3}, r"model\.layers\.3\."),
        ({"intermediate_size": 64}, "mlp"),
        ({"attention_bias": False}, r"self_attn.\w+_proj.bias"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"num_key_value_heads": 3}, "heads"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(checkpoint: Path, changes: dict[str, Any], named: str) -> None:
    edit_json(checkpoint / "config.json", **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        open_source(checkpoint)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_norm.weight", "model.layers.1.mlp.router.weight"])
def test_unknown_tensors_are_refused_by_name(checkpoint: Path, name: str) -> None:
    stored = load_file(checkpoint / "model.safetensors") | {name: torch.ones(16)}
    save_file(stored, checkpoint / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=name):
        open_source(checkpoint)


def test_tensors_that_change_nothing_are_ignored(tiny_model: TinyModel, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(tiny_model(), tmp_path / "model"))
    stored = load_file(checkpoint / "model.safetensors")
    stored |= {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "lm_head.weight": stored["model.embed_tokens.weight"].clone(),
    }
    save_file(stored, checkpoint / "model.safetensors")
    assert open_source(checkpoint).spec.tied_embeddings


def test_codes_of_another_quantization_are_refused(checkpoint: Path) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    stored["lm_head.weight"] = stored["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(stored, checkpoint / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight is stored as F8_E4M3"):
        open_source(checkpoint)


def test_a_truncated_file_is_found(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataLossError, match=r"model\.safetensors"):
        open_source(checkpoint)


def test_values_that_are_not_finite_are_found(checkpoint: Path) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    stored["lm_head.weight"][3, 4] = torch.nan
    save_file(stored, checkpoint / "model.safetensors")
    with pytest.raises(DataLossError, match=r"output\.weight"):
        open_source(checkpoint).tensor("output.weight")


def test_anything_else_is_refused_with_what_is_supported(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path / "empty", tmp_path / "notes.txt", tmp_path / "missing"):
        with pytest.raises(UnsupportedModelError, match="GGUF file"):
            open_source(path)
    with pytest.raises(UnsupportedModelError, match="give the folder"):
        open_source(checkpoint / "model.safetensors")
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json"):
        open_source(checkpoint)


def _minimal(checkpoint: Path) -> Path:
    """Keeps only the configuration's obligatory fields; weights are cut to match the defaults."""
    optional = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings")
    edit_json(checkpoint / "config.json", **dict.fromkeys(optional))
    stored = load_file(checkpoint / "model.safetensors")
    for name, tensor in stored.items():
        if "k_proj" in name or "v_proj" in name:
            stored[name] = torch.cat([tensor, tensor])
    save_file(stored, checkpoint / "model.safetensors")
    return checkpoint
