"""`headrace pack`: prepares a model for streaming."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shared.pack.sources import Source


def pack_command(
    source: Annotated[
        str,
        typer.Argument(
            help="A GGUF file, a Hugging Face folder with safetensors files, or smollm2-135m for the embedded model."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="The folder to make.")],
    scheme: Annotated[str, typer.Option(help="How weights are stored: fp32, bf16, int8 or nf4.")] = "bf16",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a pack that is there.")] = False,
) -> None:
    """Pack a model: one file per layer, quantized, with digests. Interrupted, the same command goes on."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from shared.pack.writer import PackProgress, write_pack
    from shared.quant.schemes import scheme_named

    chosen = scheme_named(scheme)
    checkpoint = _open(source)
    columns = (
        TextColumn("packing"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("packing", total=None, visible=False)  # nothing to show where packing is refused

        def show(progress: PackProgress) -> None:
            # What an earlier run finished is left out, so that speed and time left are those of this run.
            resumed = progress.resumed_bytes
            total, done = progress.total_bytes - resumed, progress.done_bytes - resumed
            bar.update(task, total=total, completed=done, visible=True)

        manifest = write_pack(checkpoint, out, chosen, overwrite=overwrite, progress=show)
    size_bytes = sum(record.size_bytes for record in manifest.files.values())
    print(f"{out}: {manifest.source} in {manifest.scheme}, {size_bytes / 1e6:,.1f} MB, model {manifest.model_digest}")


def _open(source: str) -> Source:
    from shared.pack.sources import open_source
    from shared.pack.sources.embedded import EMBEDDED_MODELS, embedded_model

    return open_source(embedded_model(source) if source in EMBEDDED_MODELS else Path(source))
