"""`headrace inspect` tells what a pack is, and `headrace pack --check` whether it is that still, and how good."""

from __future__ import annotations

import json
import re
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace.cli import app
from shared.errors import ConfigurationError, DataLossError
from shared.pack.reader import Pack
from tests.conftest import FamilyPack, TinyPack
from tests.models import CHAT_TEMPLATE, tiny_checkpoint

TEXT = "The report for site seven began at six in the morning. " * 20


def headrace(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def test_inspect_shows_model_sizes_digests_tokenizer_and_template(tiny_pack: TinyPack) -> None:
    path = tiny_pack("int8")
    result = headrace("inspect", path)
    assert result.exit_code == 0, result.output
    pack = Pack.open(path)
    expected = [
        "in int8",
        pack.manifest.model_digest,
        "4 layers of 45,056",
        "hidden size",
        "168,512",
        "512 bytes a token",
    ]
    expected += [pack.layer_digest(layer) for layer in range(4)] + ["attention.qkv.SCB", "128 × 64"]
    expected += ["BPE, 320 tokens, 2 of them special", "184 characters"]
    assert [words for words in expected if words not in result.output] == []


def test_inspect_shows_experts_apart_from_layers(family_pack: FamilyPack) -> None:
    path = family_pack("int8", "OLMoE")
    pack, shown = Pack.open(path), headrace("inspect", path).output
    expected = [f"8 experts in each of {pack.expert_bytes:,}", "Tensors of an expert", "gate_up.SCB", "256 × 64"]
    assert [words for words in expected if words not in shown] == []
    found = json.loads(headrace("inspect", path, "--json").stdout)
    assert found["expert_bytes"] == pack.expert_bytes
    assert found["expert_tensors"]["down.weight"] == {"dtype": "int8", "shape": [64, 128], "bytes": 8192}


def test_inspect_has_the_same_for_programs(tiny_pack: TinyPack) -> None:
    path = tiny_pack("nf4")
    found = json.loads(headrace("inspect", path, "--json").stdout)
    files = {name: (path / name).read_bytes() for name in found["files"]}
    assert {name: sha256(content).hexdigest() for name, content in files.items()} == {
        name: record["sha256"] for name, record in found["files"].items()
    }
    assert found["total_bytes"] == sum(map(len, files.values()))
    assert found["spec"] == Pack.open(path).spec.to_json()
    assert found["layer_tensors"]["mlp.down.weight"] == {"dtype": "uint8", "shape": [64, 64], "bytes": 4096}
    assert found["tokenizer"] == {"kind": "BPE", "vocab_size": 320, "special_tokens": 2, "puts_before": []}
    assert found["chat_template"] == {"characters": len(CHAT_TEMPLATE), "variables": []}


def test_inspect_names_what_a_template_reads(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", layers=1)
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{{ bos_token }}{{ messages[0].content }}{{ enable_thinking }}"
    )
    (checkpoint / "chat_template.jinja").write_text(template + "{{ namespace(a=1).a }}{{ strftime_now('%Y') }}")
    assert headrace("pack", checkpoint, tmp_path / "pack").exit_code == 0
    assert "reads enable_thinking, tools" in headrace("inspect", tmp_path / "pack").output


def test_check_passes_an_intact_pack_and_compares_perplexities(tiny_pack: TinyPack, text: Path) -> None:
    result = headrace("pack", "--check", tiny_pack("int8"), "--text", text, "--against", tiny_pack("fp32"))
    assert result.exit_code == 0, result.output
    own, other = map(float, re.findall(r"perplexity ([0-9.]+) over [0-9,]+ tokens", result.stdout))
    (ratio,) = map(float, re.findall(r"ratio ([0-9.]+), the same token", result.stdout))
    assert 0.9 < ratio < 1.1
    assert ratio == pytest.approx(own / other, abs=1e-3)
    assert result.stdout.count("intact") == 2


def test_check_names_the_file_that_is_damaged(tiny_pack: TinyPack, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_pack("bf16"), tmp_path / "pack"))
    layer = path / "layers/00002.safetensors"
    content = bytearray(layer.read_bytes())
    content[-5000] ^= 1
    layer.write_bytes(content)
    error = headrace("pack", "--check", path).exception
    assert isinstance(error, DataLossError)
    assert "00002.safetensors is damaged" in str(error)


def test_check_refuses_what_cannot_be_compared(tiny_pack: TinyPack, text: Path, tmp_path: Path) -> None:
    other = headrace("pack", "--check", tiny_pack("fp32"), "--text", text, "--against", tiny_pack("fp32", vocab=260))
    assert isinstance(other.exception, ConfigurationError)
    assert "into other tokens" in str(other.exception)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    binary = headrace("pack", "--check", tiny_pack("fp32"), "--text", tmp_path / "binary")
    assert "cannot be read as UTF-8 text" in str(binary.exception)
    assert isinstance(headrace("pack", "--check", tmp_path).exception, ConfigurationError)
    assert isinstance(headrace("inspect", tmp_path).exception, ConfigurationError)


@pytest.mark.parametrize(
    "arguments",
    [["--check", "pack", "source"], ["source"], ["source", "out", "--text", "a"], ["source", "out", "--against", "a"]],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str]) -> None:
    assert headrace("pack", *arguments).exit_code == 2
