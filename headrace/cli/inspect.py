"""`headrace inspect`: what a pack is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def inspect(
    pack: Annotated[Path, typer.Argument(help="The packed model.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a pack is: model, scheme, sizes, digests, tokenizer and chat template. Weights are not read."""
    from headrace.cli._inspect_view import show, to_json
    from shared.pack.reader import Pack

    opened = Pack.open(pack)
    print(json.dumps(to_json(opened), indent=2, ensure_ascii=False)) if as_json else show(opened)
