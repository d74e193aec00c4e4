"""Fixtures that every suite shares: packs, made once per session."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported anywhere: tests use no network
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # before torch is: see shared.threads

from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.models import smollm2_gguf, tiny_checkpoint


class Smollm2Pack(Protocol):
    """Packs SmolLM2-135M-Instruct once per session and scheme."""

    def __call__(self, scheme: str) -> Path: ...


class TinyPack(Protocol):
    """Packs a tiny random model once per session, scheme and checkpoint options (those of `tiny_checkpoint`)."""

    def __call__(self, scheme: str, **checkpoint: Any) -> Path: ...


class TinyCheckpoint(Protocol):
    """Writes a tiny random checkpoint once per session and options (those of `tests.models.tiny_checkpoint`)."""

    def __call__(self, **checkpoint: Any) -> Path: ...


class FamilyPack(Protocol):
    """Packs a tiny random model of a family once per session, scheme and case (`tests.shared.model.families`)."""

    def __call__(self, scheme: str, case: str) -> Path: ...


@pytest.fixture(scope="session")
def smollm2_pack(tmp_path_factory: pytest.TempPathFactory) -> Smollm2Pack:
    folder = tmp_path_factory.mktemp("smollm2")

    @cache
    def make(scheme: str) -> Path:
        return pack(smollm2_gguf(), folder / scheme, scheme)

    return make


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    @cache
    def make(**checkpoint: Any) -> Path:
        return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), **checkpoint)

    return make


@pytest.fixture(scope="session")
def tiny_pack(tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyCheckpoint) -> TinyPack:
    @cache
    def make(scheme: str, **checkpoint: Any) -> Path:
        return pack(tiny_model(**checkpoint), tmp_path_factory.mktemp("tiny") / scheme, scheme)

    return make


@pytest.fixture(scope="session")
def family_pack(tmp_path_factory: pytest.TempPathFactory) -> FamilyPack:
    from tests.shared.model.families import family_checkpoint

    @cache
    def checkpoint(case: str) -> Path:
        return family_checkpoint(tmp_path_factory.mktemp("checkpoint"), case)

    @cache
    def make(scheme: str, case: str) -> Path:
        return pack(checkpoint(case), tmp_path_factory.mktemp("family") / scheme, scheme)

    return make


def pack(source: Path, out: Path, scheme: str) -> Path:
    """Packs a checkpoint and returns the pack's folder."""
    from shared.pack.sources import open_source
    from shared.pack.writer import write_pack
    from shared.quant.schemes import scheme_named

    write_pack(open_source(source), out, scheme_named(scheme), progress=None)
    return out
