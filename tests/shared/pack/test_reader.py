"""Opening and verifying packs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from shared.errors import ConfigurationError, DataLossError, HeadraceError
from shared.model.spec import ModelSpec
from shared.pack.reader import Pack
from tests.models import CHAT_TEMPLATE
from tests.shared.pack.checkpoints import FULL, edit_json

TinyPack = Callable[..., Path]


@pytest.fixture
def pack_copy(tiny_pack: TinyPack, tmp_path: Path) -> Path:
    """A copy of a tiny pack that a test may damage."""
    return Path(shutil.copytree(tiny_pack("int8", **FULL), tmp_path / "pack"))


def test_an_intact_pack_opens_and_verifies(pack_copy: Path) -> None:
    pack, read = Pack.open(pack_copy), list[int]()
    pack.verify(read.append)
    headers = pack.layer_layout.data_start * pack.spec.layers + pack.outer_layout.data_start
    assert sum(read) + headers == sum(record.size_bytes for record in pack.manifest.files.values())
    assert isinstance(pack.spec, ModelSpec)
    assert pack.scheme.name == "int8"
    assert pack.layer_path(3).is_file()
    assert pack.layer_digest(3) != pack.layer_digest(2)
    assert pack.chat_template() == CHAT_TEMPLATE
    assert Tokenizer.from_str(pack.tokenizer_json()).get_vocab_size() == pack.spec.vocab_size


def test_outer_weights_are_views_into_one_aligned_allocation(pack_copy: Path) -> None:
    pack = Pack.open(pack_copy)
    outer, expected = pack.read_outer(), load_file(pack_copy / "outer.safetensors")
    assert outer.keys() == {"final_norm.weight", "output.weight"}, "an embedding of its own stays on disk"
    assert all(torch.equal(tensor, expected[name]) for name, tensor in outer.items())
    assert len({tensor.untyped_storage().data_ptr() for tensor in outer.values()}) == 1
    assert {tensor.data_ptr() % 64 for tensor in outer.values()} == {0}
    assert outer["output.weight"].untyped_storage().nbytes() == pack.outer_bytes


def test_a_model_without_a_chat_template_has_none(pack_copy: Path) -> None:
    (pack_copy / "chat_template.jinja").unlink()
    manifest = json.loads((pack_copy / "manifest.json").read_text())
    del manifest["files"]["chat_template.jinja"]
    (pack_copy / "manifest.json").write_text(json.dumps(manifest))
    assert Pack.open(pack_copy).chat_template() is None


@pytest.mark.parametrize(
    "name", ["outer.safetensors", "layers/00001.safetensors", "tokenizer.json", "chat_template.jinja"]
)
def test_truncated_and_missing_files_are_found_when_the_pack_is_opened(pack_copy: Path, name: str) -> None:
    file = pack_copy / name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataLossError, match=name):
        Pack.open(pack_copy)
    file.unlink()
    with pytest.raises(DataLossError, match=name):
        Pack.open(pack_copy)


@pytest.mark.parametrize("position", [-1, 20, 5000])
@pytest.mark.parametrize("name", ["outer.safetensors", "layers/00003.safetensors", "tokenizer.json"])
def test_one_changed_byte_anywhere_is_found(pack_copy: Path, name: str, position: int) -> None:
    content = bytearray((pack_copy / name).read_bytes())
    content[position] ^= 1
    (pack_copy / name).write_bytes(content)
    with pytest.raises(DataLossError, match=name):
        Pack.open(pack_copy).verify()
    if name == "outer.safetensors":
        with pytest.raises(DataLossError, match=name):
            Pack.open(pack_copy).read_outer()
    if name == "tokenizer.json":
        with pytest.raises(DataLossError, match=name):
            Pack.open(pack_copy).tokenizer_json()


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"{}"])
def test_a_manifest_that_is_none_is_refused(pack_copy: Path, content: bytes) -> None:
    (pack_copy / "manifest.json").write_bytes(content)
    with pytest.raises(ConfigurationError, match="pack the model again"):
        Pack.open(pack_copy)


def test_what_is_no_pack_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ConfigurationError, match="is no pack"):
            Pack.open(path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format_version": 2}, "version 2"),
        ({"scheme": "int3"}, "int3"),
        ({"model_digest": "abc"}, "model_digest"),
        ({"source": None}, "fields"),
        ({"surprise": 1}, "surprise"),
        ({"end_token_ids": ["2"]}, "end_token_ids"),
        ({"special_tokens": {"bos_token": 1}}, "special_tokens"),
        ({"files": {"../../etc/passwd": {"size_bytes": 1, "sha256": "0" * 64}}}, "outside the pack"),
        ({"files": {"/etc/passwd": {"size_bytes": 1, "sha256": "0" * 64}}}, "outside the pack"),
        ({"files": {"tokenizer.json": {"size_bytes": -1, "sha256": "0" * 64}}}, "size"),
        ({"files": {"tokenizer.json": {"size_bytes": 1, "sha256": "0"}}}, "sha256"),
        ({"files": {"tokenizer.json": {"size_bytes": 1, "sha256": "0" * 64}}}, "other files"),
    ],
)
def test_a_manifest_that_is_not_valid_is_refused(pack_copy: Path, changes: dict[str, Any], named: str) -> None:
    edit_json(pack_copy / "manifest.json", **changes)
    with pytest.raises(ConfigurationError, match=named):
        Pack.open(pack_copy)


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", "4"), ("layers", 0), ("heads", True), ("rope_theta", "big"), ("tied_embeddings", 1), ("new", 1)],
)
def test_a_spec_that_is_not_valid_is_refused(pack_copy: Path, field: str, value: object) -> None:
    spec = json.loads((pack_copy / "manifest.json").read_text())["spec"]
    edit_json(pack_copy / "manifest.json", spec=spec | {field: value})
    with pytest.raises(ConfigurationError, match=field):
        Pack.open(pack_copy)


def test_a_spec_that_does_not_fit_the_files_is_refused(pack_copy: Path) -> None:
    spec = json.loads((pack_copy / "manifest.json").read_text())["spec"]
    edit_json(pack_copy / "manifest.json", spec=spec | {"hidden_size": 128})
    with pytest.raises(HeadraceError, match="pack the model again"):
        Pack.open(pack_copy)
