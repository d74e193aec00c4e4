"""Damaged and hostile descriptions of models end in a model or in a refusal, at once, never in anything else."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import DataLossError, HeadraceError, UnsupportedModelError
from shared.model.spec import ModelSpec
from shared.pack.sources import open_source
from shared.pack.sources.config_json import spec_of_config
from shared.pack.sources.gguf_reader import read_gguf
from tests.conftest import TinyCheckpoint
from tests.shared.model.families import CASES, SIZES
from tests.shared.pack.checkpoints import FULL, write_gguf

SCALAR = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.sampled_from([2**31, 2**63, 10**30]),
    st.floats(),
    st.text(max_size=4),
)
JSON = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))


@st.composite
def changed(draw: st.DrawFn, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with up to three of them, or fields of theirs, replaced by anything, and perhaps one more."""
    copy = dict(fields)
    for name in draw(st.lists(st.sampled_from(sorted(copy)), min_size=1, max_size=3, unique=True)):
        value = copy[name]
        copy[name] = draw(changed(value) | JSON if isinstance(value, dict) and value else JSON)
    return copy | draw(st.dictionaries(st.text(max_size=3), JSON, max_size=1))


@pytest.fixture(scope="module")
def gguf(tiny_model: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", tiny_model(**FULL)).read_bytes()


@settings(max_examples=400)
@given(st.sampled_from(sorted(CASES)).flatmap(lambda case: changed(SIZES | CASES[case])))
def test_any_config_json(config: dict[str, Any]) -> None:
    with suppress(UnsupportedModelError):
        assert isinstance(spec_of_config(config, "model"), ModelSpec)


@settings(max_examples=200)
@given(st.sampled_from(sorted(CASES)).flatmap(lambda c: changed(spec_of_config(SIZES | CASES[c], "model").to_json())))
def test_any_spec_in_a_manifest(value: dict[str, Any]) -> None:
    try:
        spec = ModelSpec.from_json(json.loads(json.dumps(value)))
    except UnsupportedModelError:
        return
    assert ModelSpec.from_json(spec.to_json()) == spec


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_gguf_file_with_changed_bytes(gguf: bytes, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(gguf)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, 12_000))
        content[place : place + 4] = data.draw(st.binary(min_size=4, max_size=4))
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with suppress(HeadraceError):
        assert open_source(path).name == "m.gguf"


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_a_gguf_file_that_ends_early(gguf: bytes, tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf[: data.draw(st.integers(4, len(gguf) - 1))])
    with pytest.raises(DataLossError, match=r"m\.gguf"):
        open_source(path)


@pytest.mark.parametrize(
    "body",
    [
        struct.pack("<QQ", 0, 2**60),
        struct.pack("<QQ", 2**60, 0),
        struct.pack("<QQQ", 0, 1, 2**60),
        struct.pack("<QQQ1sIIQ", 0, 1, 1, b"a", 9, 4, 2**60),
        struct.pack("<QQQ1sIIQ", 0, 1, 1, b"a", 9, 8, 2**60),
        struct.pack("<QQQ1sIIQIQ", 0, 1, 1, b"a", 9, 9, 1, 9, 1),
        struct.pack("<QQQ1sIQQIQ", 1, 0, 1, b"t", 2, 2**40, 2**40, 0, 0),
        struct.pack("<QQQ1sIIQ1sII", 0, 2, 1, b"a", 4, 7, 1, b"a", 4, 7),
    ],
    ids=["fields", "tensors", "text", "numbers", "texts", "nested", "tensor", "twice"],
)
def test_what_a_gguf_file_claims_is_not_believed(body: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + body)
    with pytest.raises(DataLossError, match=r"m\.gguf is no complete GGUF file"):
        read_gguf(path)


def test_another_version_of_the_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(16))
    with pytest.raises(UnsupportedModelError, match="version 50331648"):
        read_gguf(path)
