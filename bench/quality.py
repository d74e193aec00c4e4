"""What each scheme costs in quality: perplexity on real text, and agreement with the unquantized model.

    python -m bench.quality [SOURCE] [--json FILE]

The text is that of the example reports. Formats that are not schemes of ours (double quantization, fp4, int8 with 8-bit
activations) are measured beside them, to show why the schemes are what they are, and so are products that a processor
may choose for int8 (`shared.quant.candidates`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.prompts import REPORTS_FILE
from decode_service.text.tokenizer import Tokenizer
from shared.pack.reader import Pack
from shared.pack.sources import open_source
from shared.pack.sources.embedded import embedded_model
from shared.pack.sources.source import Source
from shared.pack.writer import write_pack
from shared.perplexity import Predictions, predictions, streamed_model
from shared.quant.kernels import integer_product, mixed_int8
from shared.quant.schemes import Scheme, scheme_named
from shared.quant.widened import widened_int8

Product = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Variant:
    """One way to store and multiply the layers' matrices."""

    name: str
    bits: float
    """Stored bits a weight, scales included."""
    scheme: str
    """Scheme of the pack that is measured."""
    round_trip: Callable[[Tensor], Tensor] | None = None
    """Applied to every matrix before it is packed."""
    product: Product | None = None
    """Instead of the scheme's own."""


@dataclass(frozen=True)
class Quality:
    """What a variant measured."""

    name: str
    bits: float
    perplexity: float
    perplexity_ratio: float
    """To the unquantized model."""
    agreement: float
    """Share of positions where the likeliest token is the unquantized model's."""
    mean_run: float
    """Mean length of runs of agreement: what a draft of this kind could be accepted for."""


def main() -> None:
    """Measures all variants and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path, default=None, help="the embedded default model")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    source = open_source(arguments.source or embedded_model("smollm2-135m"))
    qualities = list(measure(source, variants()))
    print_table(qualities)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(quality) for quality in qualities], indent=1))


def variants() -> list[Variant]:
    """The schemes, and what they might have been."""
    return [
        Variant("fp32 (reference)", 32, "fp32"),
        Variant("bf16", 16, "bf16"),
        Variant("int8", 8, "int8"),
        Variant("int8, widened", 8, "int8", product=widened_int8),
        Variant("int8, mixed", 8, "int8", product=mixed_int8),
        Variant("int8, 8-bit activations", 8, "int8", product=coarse_int8),
        Variant("nf4", 4.25, "nf4"),
        Variant("nf4, fp32 scales", 4.5, "bf16", four_bit("nf4", double=False)),
        Variant("nf4, double quantization", 4.127, "bf16", four_bit("nf4", double=True)),
        Variant("fp4, fp32 scales", 4.5, "bf16", four_bit("fp4", double=False)),
        Variant("fp4, double quantization", 4.127, "bf16", four_bit("fp4", double=True)),
    ]


def measure(source: Source, wanted: list[Variant]) -> Iterator[Quality]:
    """Runs every variant over the same text; the first is the reference."""
    tokens = text_tokens(source)
    reference: Predictions | None = None
    for variant in wanted:
        found = variant_predictions(source, variant, tokens)
        reference = reference or found
        agrees = found.choices == reference.choices
        yield Quality(
            variant.name,
            variant.bits,
            found.perplexity,
            found.perplexity / reference.perplexity,
            found.agreement(reference),
            float(agrees.sum() / (~agrees).sum().clamp(min=1)),
        )


def text_tokens(source: Source) -> list[list[int]]:
    """The reports as token ids, one sequence each."""
    tokenizer = Tokenizer(source.tokenizer_json, None, {})
    lines = map(json.loads, REPORTS_FILE.read_text(encoding="utf-8").splitlines())
    return [tokenizer.encode(line["messages"][-1]["content"]) for line in lines]


def variant_predictions(source: Source, variant: Variant, tokens: list[list[int]]) -> Predictions:
    """Packs the variant and runs the text through it."""
    if variant.round_trip:
        source = _rounded(source, variant.round_trip)
    with tempfile.TemporaryDirectory() as folder:
        write_pack(source, Path(folder) / "pack", scheme_named(variant.scheme))
        pack = Pack.open(Path(folder) / "pack")
        if variant.product:
            pack = dataclasses.replace(pack, scheme=_with_product(pack.scheme, variant.product))
        with contextlib.closing(streamed_model(pack)) as model:
            return predictions(model, tokens)


def four_bit(kind: str, *, double: bool) -> Callable[[Tensor], Tensor]:
    """Quantization by bitsandbytes and back, in blocks of 64."""

    def round_trip(weight: Tensor) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        codes, state = quantize_4bit(weight.contiguous(), blocksize=64, quant_type=kind, compress_statistics=double)
        restored: Tensor = dequantize_4bit(codes, state)
        return restored

    return round_trip


def coarse_int8(x: Tensor, weight: Mapping[str, Tensor]) -> Tensor:
    """An int8 product with activations of 8 bits a row: one integer product rather than two."""
    row_max = x.abs().amax(dim=1, keepdim=True).float().clamp_(min=1e-30)
    codes = (x.float() * (127.0 / row_max)).round_().to(torch.int8)
    sums = integer_product(codes, weight["weight"]).float()
    return (sums * (row_max / 127.0) * (weight["SCB"] / 127.0)).to(x.dtype)


def print_table(qualities: list[Quality]) -> None:
    """All variants."""
    table = Table(title="quality on the text of the example reports")
    for column in ("variant", "bits", "perplexity", "ratio", "agreement", "mean run"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for quality in qualities:
        table.add_row(
            quality.name,
            f"{quality.bits:g}",
            f"{quality.perplexity:.3f}",
            f"{quality.perplexity_ratio:.4f}",
            f"{quality.agreement:.1%}",
            f"{quality.mean_run:.1f}",
        )
    Console().print(table)


def _rounded(source: Source, round_trip: Callable[[Tensor], Tensor]) -> Source:
    """The source with its layers' matrices quantized and restored."""

    def read_rows(name: str, rows: slice) -> Tensor:
        values = source.read_rows(name, rows)
        return round_trip(values.float()) if name.startswith("layers.") and values.ndim == 2 else values

    return dataclasses.replace(source, read_rows=read_rows)


def _with_product(scheme: Scheme, product: Product) -> Scheme:
    return dataclasses.replace(scheme, product=product)


if __name__ == "__main__":
    main()
