"""What is no model that can be packed is refused by its name, before any weight is read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from shared.errors import UnsupportedModelError
from shared.pack.sources import open_source
from tests.conftest import TinyCheckpoint
from tests.shared.pack.checkpoints import edit_json


@pytest.fixture
def checkpoint(tiny_model: TinyCheckpoint, tmp_path: Path) -> Path:
    """A copy of a tiny checkpoint that a test may change."""
    return Path(shutil.copytree(tiny_model(), tmp_path / "model"))


def test_an_adapter_is_called_one(checkpoint: Path) -> None:
    (checkpoint / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"adapter \(LoRA\).*base model"):
        open_source(checkpoint)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"])
def test_pickled_checkpoints_are_never_opened(checkpoint: Path, name: str) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / name)
    with pytest.raises(UnsupportedModelError, match=r"pickled.*safetensors"):
        open_source(checkpoint)
    with pytest.raises(UnsupportedModelError, match=r"pickled.*safetensors"):
        open_source(checkpoint / name)


@pytest.mark.parametrize(
    ("method", "named"),
    [("gptq", "GPTQ"), ("awq", "AWQ"), ("bitsandbytes", "bitsandbytes"), ("fp8", "FP8"), ("hqq", "hqq")],
)
def test_weights_quantized_by_another_program_are_named_after_it(checkpoint: Path, method: str, named: str) -> None:
    edit_json(checkpoint / "config.json", quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UnsupportedModelError, match=f"quantized with {named}.*unquantized checkpoint"):
        open_source(checkpoint)


@pytest.mark.parametrize(("file", "named"), [("quantize_config.json", "GPTQ"), ("quant_config.json", "AWQ")])
def test_older_quantized_checkpoints_are_known_by_a_file_of_their_own(checkpoint: Path, file: str, named: str) -> None:
    (checkpoint / file).write_text("{}")
    with pytest.raises(UnsupportedModelError, match=f"quantized with {named}"):
        open_source(checkpoint)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma3", "vision_config": {"hidden_size": 8}}, "vision tower.*language model alone"),
        ({"model_type": "qwen2_audio", "audio_config": {}}, "audio tower"),
        ({"model_type": "bert"}, "encoder model.*'bert'"),
        ({"model_type": "modernbert"}, "encoder model"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "encoder model"),
        ({"model_type": "qwen2_moe"}, "model_type is 'qwen2_moe'; this version loads llama, qwen2"),
        ({"model_type": None}, "model_type is None"),
        ({"model_type": ["llama"]}, "model_type is"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["MistralForCausalLM"]}, "'LlamaForCausalLM' only"),
    ],
)
def test_models_of_another_kind_are_named(checkpoint: Path, changes: dict[str, Any], named: str) -> None:
    edit_json(checkpoint / "config.json", **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        open_source(checkpoint)


def test_weights_that_are_no_regular_file_are_not_waited_for(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    os.mkfifo(checkpoint / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="one safetensors file was expected; found none"):
        open_source(checkpoint)


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("tokenizer.json", b"\xff\xfe", r"tokenizer\.json is no UTF-8 text"),
        ("tokenizer.json", b"{}", "its tokenizer cannot be read"),
        ("chat_template.jinja", b"\xff\xfe", r"chat_template\.jinja is no UTF-8 text"),
        ("chat_template.jinja", b"{% for %}", "chat template is not valid"),
    ],
)
def test_texts_that_services_could_not_use_are_found_before_packing(
    checkpoint: Path, file: str, content: bytes, named: str
) -> None:
    (checkpoint / file).write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=named):
        open_source(checkpoint)


def test_of_several_chat_templates_only_the_default_counts(checkpoint: Path) -> None:
    templates = [{"name": ["odd"], "template": "a"}, {"name": "default", "template": "b"}, "c"]
    edit_json(checkpoint / "tokenizer_config.json", chat_template=templates)
    assert open_source(checkpoint).chat_template == "b"
