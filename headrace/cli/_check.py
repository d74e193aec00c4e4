"""`headrace pack --check`: whether a pack is what was written, and how well it predicts a text."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli._progress import progress
from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from shared.pack.reader import Pack
    from shared.perplexity import Predictions


def check_pack(path: Path, text: Path | None, against: Path | None) -> None:
    """Verifies a pack, and prints its perplexity on a text, where one is given, and another pack's.

    Raises:
        ConfigurationError: a folder is no pack, or the text or the other pack does not fit.
        DataLossError: a file of a pack is damaged; the message names it.
    """
    from shared.threads import wait_passively

    wait_passively()
    import torch

    from shared.pack.reader import Pack
    from shared.pack.texts import template_facts, tokenizer_facts
    from shared.perplexity import text_windows

    torch.set_num_threads(os.cpu_count() or 1)
    packs = [Pack.open(place) for place in (path, against) if place is not None]
    for pack in packs:
        _verify(pack)
        template_facts(pack)
        size, manifest = tokenizer_facts(pack).vocab_size, pack.manifest
        if size > pack.spec.vocab_size:
            raise ConfigurationError(
                f"{pack.path}: the tokenizer knows {size:,} tokens, the model {pack.spec.vocab_size:,}; "
                "pack it with the tokenizer that belongs to it"
            )
        print(f"{pack.path}: intact, {manifest.source} in {manifest.scheme}, model {manifest.model_digest}")
    if text is not None:
        windows = [text_windows(pack, _read(text)) for pack in packs]
        if windows[0] != windows[-1]:
            raise ConfigurationError(
                f"{against} cuts the text into other tokens than {path}; "
                "perplexities compare only where tokenizer and longest context are the same"
            )
        _compare(packs, [_predictions(pack, windows[0]) for pack in packs])


def _verify(pack: Pack) -> None:
    total_bytes = sum(record.size_bytes for record in pack.manifest.files.values())
    with progress(f"verifying {pack.path.name}", in_bytes=True) as (bar, task):
        bar.update(task, total=total_bytes, visible=True)
        pack.verify(lambda size_bytes: bar.advance(task, size_bytes))
        bar.update(task, completed=total_bytes)


def _predictions(pack: Pack, windows: list[list[int]]) -> Predictions:
    from shared.perplexity import predictions, streamed_model

    with closing(streamed_model(pack)) as model, progress(f"scoring {pack.path.name}") as (bar, task):
        return predictions(
            model, windows, lambda done, total: bar.update(task, completed=done, total=total, visible=True)
        )


def _read(text: Path) -> str:
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{text} cannot be read as UTF-8 text: {error}") from None


def _compare(packs: list[Pack], found: list[Predictions]) -> None:
    for pack, one in zip(packs, found, strict=True):
        print(f"{pack.path}: perplexity {one.perplexity:.4f} over {len(one.choices):,} tokens")
    if len(found) == 2:
        own, other = found
        print(
            f"ratio {own.perplexity / other.perplexity:.4f}, the same token likeliest at {own.agreement(other):.1%} "
            "of places"
        )
