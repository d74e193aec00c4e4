"""Packs and a checkpoint of the embedded model for benchmarks, made in `build/` where they are missing."""

from __future__ import annotations

from pathlib import Path

from bench.checkpoints import write_checkpoint
from shared.pack.sources import open_source
from shared.pack.sources.embedded import embedded_model
from shared.pack.writer import write_pack
from shared.quant.schemes import scheme_named

FOLDER = Path("build")


def embedded_pack(scheme: str) -> Path:
    """SmolLM2-135M-Instruct in a scheme."""
    path = FOLDER / f"smollm2-135m-{scheme}"
    if not (path / "manifest.json").exists():
        FOLDER.mkdir(exist_ok=True)
        write_pack(open_source(embedded_model("smollm2-135m")), path, scheme_named(scheme), progress=None)
    return path


def embedded_checkpoint() -> Path:
    """The same weights as a Hugging Face folder."""
    path = FOLDER / "smollm2-135m-checkpoint"
    if not (path / "config.json").exists():
        write_checkpoint(open_source(embedded_model("smollm2-135m")), path)
    return path
