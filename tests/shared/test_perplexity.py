"""Perplexity is what transformers gives on the same weights, however texts are cut into passes."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, processors

from shared.errors import ConfigurationError
from shared.pack.reader import Pack
from shared.perplexity import predictions, streamed_model, text_windows
from tests.conftest import TinyCheckpoint, TinyPack
from tests.conftest import pack as packed
from tests.models import BOS
from tests.shared.model.runs import random_tokens, reference_logits, reference_model

TEXT = "The inspection of pumping station seven began at six. " * 60


def test_every_next_token_is_scored_as_by_transformers(tiny_pack: TinyPack, tiny_model: TinyCheckpoint) -> None:
    sequences = [random_tokens(length, 320, length) for length in (2, 40, 90, 20, 30)]
    progress: list[tuple[int, int]] = []
    with closing(streamed_model(Pack.open(tiny_pack("fp32")))) as model:
        found = predictions(model, sequences, lambda done, total: progress.append((done, total)), pass_tokens=64)
    reference = reference_model(tiny_model())
    logits = torch.cat([reference_logits(reference, sequence)[:-1] for sequence in sequences])
    came = torch.tensor([token for sequence in sequences for token in sequence[1:]])
    expected = logits.log_softmax(-1)[torch.arange(len(came)), came]
    assert torch.allclose(found.log_probs, expected, atol=1e-4)
    assert torch.equal(found.choices, logits.argmax(-1))
    assert found.perplexity == pytest.approx(float(torch.exp(-expected.mean())), rel=1e-4)
    assert progress == [(done, 12) for done in range(1, 13)]


def test_a_text_is_cut_into_windows_that_begin_as_the_tokenizer_begins_a_text(
    tiny_pack: TinyPack, tiny_model: TinyCheckpoint, tmp_path: Path
) -> None:
    plain = Pack.open(tiny_pack("fp32"))
    tokenizer = Tokenizer.from_str(plain.tokenizer_json())
    ids = tokenizer.encode(TEXT).ids
    windows = text_windows(plain, TEXT)
    assert [token for window in windows for token in window] == ids
    assert {len(window) for window in windows[:-1]} == {512}
    checkpoint = Path(shutil.copytree(tiny_model(), tmp_path / "model"))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    windows = text_windows(Pack.open(packed(checkpoint, tmp_path / "pack", "fp32")), TEXT)
    assert [token for window in windows for token in window[1:]] == ids
    assert {window[0] for window in windows} == {0}


def test_a_text_that_predicts_nothing_is_refused(tiny_pack: TinyPack) -> None:
    with pytest.raises(ConfigurationError, match="the text has 1 tokens, too few"):
        text_windows(Pack.open(tiny_pack("fp32")), "a")
