"""The tokenizer and the chat template agree with transformers, and refuse what they cannot serve."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as LibraryTokenizer

from decode_service.text.tokenizer import Message, Tokenizer
from shared.errors import InvalidRequestError, UnsupportedModelError
from tests.models import BOS, CHAT_TEMPLATE, EOS, tiny_tokenizer

CONVERSATIONS = [
    [Message("user", "Summarize: pump 7 leaks.")],
    [Message("system", "Be brief."), Message("user", "Hello")],
    [Message("user", "One"), Message("assistant", "Two"), Message("user", "Three")],
    [Message("user", '  spaces, \n newlines and <|im_end|> "quotes" <b>&amp;</b> 👩🏽‍🚀 {{ 1 + 1 }} ')],
]


def with_template(template: str | None) -> Tokenizer:
    return Tokenizer(tiny_tokenizer(300).to_str(), template, {"bos_token": BOS, "eos_token": EOS})


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chat_prompts_are_those_of_transformers(
    smollm2_reference: Any, smollm2_tokenizer: Tokenizer, messages: list[Message]
) -> None:
    plain = [{"role": message.role, "content": message.content} for message in messages]
    expected = smollm2_reference.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    assert smollm2_tokenizer.render_chat(messages) == expected
    expected_ids = smollm2_reference.apply_chat_template(plain, add_generation_prompt=True, return_dict=True)
    assert smollm2_tokenizer.encode_chat(messages) == list(expected_ids["input_ids"])


@pytest.mark.parametrize("text", ["", "Hello world", "naïve\u0301 日本 👩🏽‍🚀", "<|im_start|>user\nhi<|im_end|>"])
def test_text_is_encoded_and_decoded_as_by_transformers(
    smollm2_reference: Any, smollm2_tokenizer: Tokenizer, text: str
) -> None:
    token_ids = smollm2_tokenizer.encode(text)
    assert token_ids == smollm2_reference(text)["input_ids"]
    assert smollm2_tokenizer.decode(token_ids) == smollm2_reference.decode(
        token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_special_tokens_written_in_text_are_recognized_and_left_out_of_decoded_text() -> None:
    tokenizer = with_template(None)
    token_ids = tokenizer.encode(f"{BOS}report{EOS}")
    assert (token_ids[0], token_ids[-1]) == (0, 1)
    assert tokenizer.decode(token_ids) == "report"
    assert not tokenizer.has_text(0)
    assert tokenizer.has_text(token_ids[1])


def test_only_plain_text_gets_the_post_processors_first_token() -> None:
    library = tiny_tokenizer(300)
    library.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    tokenizer = Tokenizer(library.to_str(), CHAT_TEMPLATE, {"bos_token": BOS, "eos_token": EOS})
    assert tokenizer.encode("report")[0] == 0
    assert tokenizer.encode_chat([Message("user", "report")]).count(0) == 2


def test_truncation_and_padding_of_a_checkpoint_are_ignored() -> None:
    library = tiny_tokenizer(300)
    library.enable_truncation(3)
    library.enable_padding(length=50)
    tokenizer = Tokenizer(library.to_str(), None, {})
    assert tokenizer.decode(tokenizer.encode("a longer report")) == "a longer report"


def test_byte_tokens_are_known_by_their_spelling() -> None:
    library = LibraryTokenizer(models.BPE({"<0xE2>": 0, "a": 1, "<0xE2>a": 2}, []))
    tokenizer = Tokenizer(library.to_str(), None, {})
    assert [tokenizer.is_byte(token_id) for token_id in range(3)] == [True, False, False]


def test_vocab_size_counts_added_tokens() -> None:
    library = LibraryTokenizer(models.BPE({"a": 0}, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    library.add_tokens([AddedToken("<extra>", special=False)])
    assert Tokenizer(library.to_str(), None, {}).vocab_size == 2


def test_a_chat_without_template_is_refused_with_the_alternatives() -> None:
    with pytest.raises(InvalidRequestError, match=r"no chat template; send prompt\.text or prompt\.tokens"):
        with_template(None).render_chat([Message("user", "hi")])


def test_an_empty_chat_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="messages is empty"):
        with_template(CHAT_TEMPLATE).render_chat([])


def test_a_role_that_the_template_refuses_is_an_invalid_request_with_its_reason() -> None:
    template = "{% if messages[0]['role'] == 'wizard' %}{{ raise_exception('unknown role') }}{% endif %}ok"
    tokenizer = with_template(template)
    assert tokenizer.render_chat([Message("user", "hi")]) == "ok"
    with pytest.raises(InvalidRequestError, match=r"unknown role; their roles are \['wizard'\]") as caught:
        tokenizer.render_chat([Message("wizard", "secret spell")])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[5].content.x }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ f() }}",
    ],
)
def test_templates_that_fail_or_leave_the_sandbox_are_invalid_requests(template: str) -> None:
    with pytest.raises(InvalidRequestError, match="refuses these 1 messages"):
        with_template(template).render_chat([Message("user", "hi")])


def test_a_broken_template_or_tokenizer_is_refused_when_the_model_is_loaded() -> None:
    with pytest.raises(UnsupportedModelError, match="chat template is not valid"):
        with_template("{% for %}")
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer("{}", None, {})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ add_generation_prompt }}", f"{BOS}True"),
        ("{{ tools is none and documents is none }}", "True"),
        ("{{ messages | tojson }}", json.dumps([{"role": "user", "content": "<é>"}], ensure_ascii=False)),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c", "ab<é>c"),
        ("x\n    {% if true %}\ny\n    {% endif %}\nz", "x\ny\nz"),
        ("{{ strftime_now('%Y') | int >= 2025 }}", str(datetime.now().year >= 2025)),
    ],
)
def test_templates_find_what_transformers_gives_them(template: str, text: str) -> None:
    assert with_template(template).render_chat([Message("user", "<é>")]) == text


def test_text_that_is_not_unicode_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        with_template(None).encode("half \ud83d")
