"""Damaged and hostile files end in a model or in a refusal, at once, and never lead outside their folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decode_service.text.tokenizer import Tokenizer
from shared.errors import ConfigurationError, DataLossError, HeadraceError, UnsupportedModelError
from shared.pack.manifest import manifest_from_json
from shared.pack.reader import Pack
from shared.pack.sources import open_source
from tests.conftest import TinyCheckpoint, TinyPack
from tests.models import tiny_tokenizer
from tests.shared.pack.quantized_checkpoints import quantized_model
from tests.shared.pack.test_fuzz import JSON, changed

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def folder(tiny_model: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that tests change and put right again."""
    return Path(shutil.copytree(tiny_model(layers=1), tmp_path_factory.mktemp("fuzz") / "model"))


@pytest.fixture(scope="module")
def quantized_folder(folder: Path, tiny_model: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with bitsandbytes' codes."""
    out = tmp_path_factory.mktemp("fuzz") / "quantized"
    quantized_model(tiny_model(layers=1), "nf4, double").save_pretrained(out)
    shutil.copy(folder / "tokenizer.json", out)
    return out


@pytest.fixture
def weights(folder: Path) -> Iterator[Path]:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    yield path
    path.write_bytes(content)


def with_header(content: bytes, header: bytes, length: int | None = None) -> bytes:
    """A safetensors file with another header."""
    end = 8 + int.from_bytes(content[:8], "little")
    return (len(header) if length is None else length).to_bytes(8, "little") + header + content[end:]


def header_of(content: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return value


@FUZZ
@given(st.data())
def test_a_safetensors_file_with_another_header(folder: Path, data: st.DataObject) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    header = data.draw(changed(header_of(content)))
    try:
        path.write_bytes(with_header(content, json.dumps(header).encode()))
        with suppress(HeadraceError):
            read_all(folder)
    finally:
        path.write_bytes(content)


@FUZZ
@given(st.data())
def test_a_quantized_safetensors_file_with_another_header(quantized_folder: Path, data: st.DataObject) -> None:
    path = quantized_folder / "model.safetensors"
    content = path.read_bytes()
    header = header_of(content)
    name = data.draw(st.sampled_from(sorted(header)))
    header[name] = data.draw(changed(header[name]) | JSON)
    try:
        path.write_bytes(with_header(content, json.dumps(header).encode()))
        with suppress(HeadraceError):
            read_all(quantized_folder)
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("header", "length"),
    [
        (b"{}", 2**63),
        (b"{}", 2**40),
        (b"{" * 90_000, None),
        (b'{"a":' * 30_000, None),
        (b'{"model.norm.weight":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,8]}}', None),
        (b'{"model.norm.weight":{"dtype":"F32","shape":[64],"data_offsets":[0,18446744073709551615]}}', None),
        (b'{"model.norm.weight":{"dtype":"F9","shape":[64],"data_offsets":[0,256]}}', None),
        (b"\xff\xfe", None),
        (b"", None),
    ],
)
def test_what_a_safetensors_header_claims_is_not_believed(
    header: bytes, length: int | None, folder: Path, weights: Path
) -> None:
    weights.write_bytes(with_header(weights.read_bytes(), header, length))
    with pytest.raises(DataLossError, match=r"model\.safetensors is no complete safetensors file"):
        open_source(folder)


@FUZZ
@given(st.integers(0, 4000))
def test_a_safetensors_file_that_ends_early(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    try:
        path.write_bytes(content[:size])
        with pytest.raises(DataLossError, match=r"model\.safetensors"):
            open_source(folder)
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "\0", 3, None, []]
)
def test_an_index_leads_nowhere_outside(shard: Any, folder: Path) -> None:
    (folder.parent / "secret.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    index = folder / "model.safetensors.index.json"
    try:
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
        with pytest.raises(UnsupportedModelError, match=r"which is no file of the folder|no weight_map"):
            open_source(folder)
    finally:
        index.unlink()


@FUZZ
@given(JSON)
def test_any_index(folder: Path, value: Any) -> None:
    index = folder / "model.safetensors.index.json"
    try:
        index.write_text(json.dumps({"weight_map": value}))
        with pytest.raises(HeadraceError):
            open_source(folder)
    finally:
        index.unlink()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"[" * 90_000, b"\xff", b"", b"3", b'{"a": NaN}', b'{"eos_token_id": "x"}'])
def test_descriptions_that_are_none(name: str, content: bytes, folder: Path) -> None:
    path = folder / name
    before = path.read_bytes()
    try:
        path.write_bytes(content)
        with suppress(HeadraceError):
            assert open_source(folder).spec.layers == 1
    finally:
        path.write_bytes(before)


@FUZZ
@given(st.data())
def test_any_manifest(tiny_pack: TinyPack, data: st.DataObject) -> None:
    manifest = json.loads((tiny_pack("int8") / "manifest.json").read_text())
    text = json.dumps(data.draw(changed(manifest)))
    with suppress(ConfigurationError):
        files = manifest_from_json(text).files
        assert not any(Path(path).is_absolute() or ".." in Path(path).parts for path in files)


@pytest.mark.parametrize("text", ["[" * 90_000, '{"a":' * 90_000, "", "3", "NaN", "\x00"])
def test_manifests_that_are_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="manifest"):
        manifest_from_json(text)


@pytest.mark.parametrize("path", ["../x.safetensors", "/etc/passwd", "layers/../../x", "", "."])
def test_a_manifest_leads_nowhere_outside(path: str, tiny_pack: TinyPack, tmp_path: Path) -> None:
    pack = Path(shutil.copytree(tiny_pack("int8"), tmp_path / "pack"))
    manifest = json.loads((pack / "manifest.json").read_text())
    manifest["files"][path] = manifest["files"].pop("tokenizer.json")
    (pack / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigurationError, match="outside the pack|lists other files"):
        Pack.open(pack)


TOKENIZER = json.loads(tiny_tokenizer(270).to_str())


@settings(max_examples=100, deadline=None)
@given(changed(TOKENIZER))
def test_any_tokenizer(value: dict[str, Any]) -> None:
    try:
        tokenizer = Tokenizer(json.dumps(value), None, {})
    except UnsupportedModelError:
        return
    with suppress(HeadraceError):
        assert isinstance(tokenizer.decode(tokenizer.encode("a report")), str)


@pytest.mark.parametrize("text", ["[" * 90_000, "{}", "", '{"version": "9"}', "\x00"])
def test_tokenizers_that_are_none(text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(text, None, {})


def read_all(folder: Path) -> None:
    """Opens a checkpoint and reads every tensor."""
    source = open_source(folder)
    for name in ("embedding.weight", "final_norm.weight"):
        source.tensor(name)
    for name in ("attention.q.weight", "attention.output.weight", "mlp.down.weight", "mlp_norm.weight"):
        source.layer_tensor(0, name)
