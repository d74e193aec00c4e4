"""The tokenizer of the real model, rebuilt from GGUF metadata, against that of `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from shared.pack.sources import Source
from tests.models import smollm2_gguf

TEXTS = [
    "The inspection of unit 7 found two leaks; pressure fell from 12.5 to 3 bar at 04:37 on 2024-11-30.",
    "Grüße aus Köln — déjà vu, naïve façade; ¿Dónde está la estación? Привет, мир!",
    "你好,世界。こんにちは 안녕하세요 مرحبا",
    "def total(xs: list[int]) -> int:\n    return sum(x**2 for x in xs if x % 3 != 0)  # squares\n\n\tpass\r\n",
    "👩‍🚒🚒 🔥🔥 3️⃣ 🇩🇪",
    "<|im_start|>user\nSummarize.<|im_end|>\n<|im_start|>assistant\n<|endoftext|><repo_name>a<file_sep>b",
    "it's they'll WE'VE I'd    trailing   \n\n  ",
    "",
    " ",
    "1234567890",
]


@pytest.fixture(scope="module")
def rebuilt(smollm2_source: Source) -> Tokenizer:
    return Tokenizer.from_str(smollm2_source.tokenizer_json)


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoTokenizer

    path = smollm2_gguf()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(text: str, rebuilt: Tokenizer, reference: Any) -> None:
    assert rebuilt.encode(text).ids == reference(text)["input_ids"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_whole(text: str, rebuilt: Tokenizer) -> None:
    assert rebuilt.decode(rebuilt.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("text", "tokens"), [("a   42", ["a", "ĠĠĠ", "4", "2"]), (" ½", ["Ġ", "Â½"]), (" 7", ["Ġ", "7"])]
)
def test_every_digit_stands_alone_whatever_comes_before_it(text: str, tokens: list[str], rebuilt: Tokenizer) -> None:
    """As the file's pre-tokenizer says; `transformers` ignores it, and differs in the first two."""
    assert rebuilt.encode(text).tokens == tokens


def test_special_tokens_are_left_out_of_text(rebuilt: Tokenizer) -> None:
    assert rebuilt.decode(rebuilt.encode("<|im_start|>yes<|im_end|>").ids) == "yes"
