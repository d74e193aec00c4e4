"""Tiny packs and prompts that the end-to-end tests share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.conftest import TinyCheckpoint, TinyPack, pack
from tests.end_to_end.checkpoints import endless, first_layers

CONTEXT = 4096

SchemePack = Callable[[str], Path]
"""Packs one model in a scheme, once per session."""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and two engines and a test share this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint(tiny_model: TinyCheckpoint) -> Path:
    """The target of most tests."""
    return tiny_model(context=CONTEXT)


@pytest.fixture(scope="session")
def target_pack(tiny_pack: TinyPack) -> SchemePack:
    return lambda scheme: tiny_pack(scheme, context=CONTEXT)


@pytest.fixture(scope="session")
def truncated_pack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> SchemePack:
    """A draft that often agrees: the target's first layers."""
    folder = tmp_path_factory.mktemp("truncated")
    source = first_layers(checkpoint, folder / "checkpoint", layers=3)
    return cache(lambda scheme: pack(source, folder / scheme, scheme))


@pytest.fixture(scope="session")
def stranger_pack(tiny_pack: TinyPack) -> SchemePack:
    """A draft that hardly ever agrees: another random model with the same tokenizer."""
    return lambda scheme: tiny_pack(scheme, context=CONTEXT, layers=2, seed=1)


@pytest.fixture(scope="session")
def endless_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes until it is stopped."""
    return endless(checkpoint, tmp_path_factory.mktemp("endless") / "checkpoint")


@pytest.fixture(scope="session")
def endless_pack(endless_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(endless_checkpoint, tmp_path_factory.mktemp("endless") / "fp32", "fp32")


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Eight prompts of mixed lengths, around block boundaries and beyond one attention chunk."""
    chosen = random.Random(1)
    lengths = (1, 3, 16, 17, 40, 33, 300, 64)
    return [[chosen.randrange(2, 320) for _ in range(length)] for length in lengths]
