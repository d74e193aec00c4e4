"""`headrace pack`: prepares a model for streaming, or checks one that is prepared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli._progress import progress

if TYPE_CHECKING:
    from shared.pack.sources import Source


def pack_command(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A GGUF file, a Hugging Face folder with safetensors files, or smollm2-135m for the embedded model."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Argument(help="The folder to make.")] = None,
    scheme: Annotated[str, typer.Option(help="How weights are stored: fp32, bf16, int8 or nf4.")] = "bf16",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a pack that is there.")] = False,
    check: Annotated[
        Path | None,
        typer.Option(metavar="PACK", help="Make nothing; compare every file of a pack with its digest."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="With --check: print the perplexity of this UTF-8 text.")] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="PACK", help="With --check: check this pack too, and compare perplexities.")
    ] = None,
) -> None:
    """Pack a model: one file per layer, quantized, with digests. Interrupted, the same command goes on.

    With --check PACK nothing is made; exit code 1: a file of the pack is damaged.
    """
    if check is not None:
        if source is not None or out is not None:
            raise typer.BadParameter("--check PACK stands alone, without SOURCE and OUT")
        from headrace.cli._check import check_pack

        check_pack(check, text, against)
    elif source is None or out is None:
        raise typer.BadParameter("give SOURCE and OUT, or --check PACK")
    elif text is not None or against is not None:
        raise typer.BadParameter("--text and --against go with --check PACK")
    else:
        _pack(source, out, scheme, overwrite=overwrite)


def _pack(source: str, out: Path, scheme: str, *, overwrite: bool) -> None:
    from shared.threads import wait_passively

    wait_passively()
    from shared.pack.writer import PackProgress, write_pack
    from shared.quant.schemes import scheme_named

    chosen = scheme_named(scheme)
    checkpoint = _open(source)
    with progress("packing", in_bytes=True) as (bar, task):

        def show(state: PackProgress) -> None:
            # What an earlier run finished is left out, so that speed and time left are those of this run.
            resumed = state.resumed_bytes
            total, done = state.total_bytes - resumed, state.done_bytes - resumed
            bar.update(task, total=total, completed=done, visible=True)

        manifest = write_pack(checkpoint, out, chosen, overwrite=overwrite, progress=show)
    size_bytes = sum(record.size_bytes for record in manifest.files.values())
    print(f"{out}: {manifest.source} in {manifest.scheme}, {size_bytes / 1e6:,.1f} MB, model {manifest.model_digest}")


def _open(source: str) -> Source:
    from shared.pack.sources import open_source
    from shared.pack.sources.embedded import EMBEDDED_MODELS, embedded_model

    return open_source(embedded_model(source) if source in EMBEDDED_MODELS else Path(source))
