"""Fixtures of the pack tests."""

from __future__ import annotations

import pytest

from shared.pack.sources import Source, open_source
from tests.models import smollm2_gguf


@pytest.fixture(scope="session")
def smollm2_source() -> Source:
    """The real model, opened once: its metadata takes seconds to parse."""
    return open_source(smollm2_gguf())
