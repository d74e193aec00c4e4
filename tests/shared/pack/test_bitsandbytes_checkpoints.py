"""Checkpoints with bitsandbytes' codes, saved by transformers, are packed as they are and answer as there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import DataLossError, UnsupportedModelError
from shared.pack.reader import Pack
from shared.pack.sources import open_source
from shared.pack.sources.bitsandbytes_matrices import quantized_matrices
from shared.pack.sources.stored_tensors import StoredTensors
from shared.pack.writer import write_pack
from shared.quant.schemes import scheme_named
from tests.conftest import TinyCheckpoint
from tests.conftest import pack as packed
from tests.shared.model.families import family_checkpoint
from tests.shared.model.runs import prompt_logits, random_tokens, reference_logits, reference_model, resident_model
from tests.shared.pack.checkpoints import edit_json
from tests.shared.pack.quantized_checkpoints import FORMS, quantized_model

Quantized = Callable[[str], Path]
TEXTS = ("tokenizer.json", "tokenizer_config.json")


def quantize(checkpoint: Path, out: Path, form: str) -> Path:
    """The checkpoint with its matrices quantized, saved by transformers."""
    quantized_model(checkpoint, form).save_pretrained(out)
    for name in TEXTS:
        shutil.copy(checkpoint / name, out / name)
    return out


@pytest.fixture(scope="module")
def quantized(tiny_model: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """A tiny model in a form."""

    @cache
    def make(form: str) -> Path:
        return quantize(tiny_model(), tmp_path_factory.mktemp("quantized") / "model", form)

    return make


def dequantized(checkpoint: Path, out: Path) -> Path:
    """The same model in floats: `test_bitsandbytes_matrices` holds what is read here to bitsandbytes' own."""
    path = checkpoint / "model.safetensors"
    stored = StoredTensors.of(dict.fromkeys(load_file(path), path))
    matrices = quantized_matrices("m", stored)
    parts = {part for matrix in matrices.values() for part in matrix.parts}
    tensors = {name: tensor for name, tensor in load_file(path).items() if name not in parts}
    tensors |= {name: matrix.dequantized(slice(None)) for name, matrix in matrices.items()}
    shutil.copytree(checkpoint, out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    edit_json(out / "config.json", quantization_config=None)
    return out


def computed_by_bitsandbytes(checkpoint: Path, tokens: Sequence[int]) -> Tensor:
    """Logits of the quantized model in transformers; in training, when nothing is rounded to bfloat16 on the way."""
    return reference_logits(reference_model(checkpoint).train(), tokens)


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_transformers_on_the_dequantized_weights(
    form: str, quantized: Quantized, tmp_path: Path
) -> None:
    tokens = random_tokens(120, 320)
    (found,) = prompt_logits(resident_model(packed(quantized(form), tmp_path / "pack", "fp32")), [tokens])
    expected = reference_logits(reference_model(dequantized(quantized(form), tmp_path / "floats")), tokens)
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("form", ["nf4", "nf4, double", "fp4"])
def test_logits_are_those_of_transformers_with_bitsandbytes(form: str, quantized: Quantized, tmp_path: Path) -> None:
    tokens = random_tokens(64, 320)
    (found,) = prompt_logits(resident_model(packed(quantized(form), tmp_path / "pack", "fp32")), [tokens])
    expected = computed_by_bitsandbytes(quantized(form), tokens)
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_a_pack_in_the_scheme_of_the_codes_is_the_one_of_the_unquantized_model(
    form: str, quantized: Quantized, tiny_model: TinyCheckpoint, tmp_path: Path
) -> None:
    """While it loads a model, transformers makes the codes that we make when we pack it; those of int8 from halves."""
    checkpoint = tiny_model()
    if form == "int8":
        checkpoint = Path(shutil.copytree(checkpoint, tmp_path / "halves"))
        tensors = load_file(checkpoint / "model.safetensors")
        halves = {n: t.half().float() if "_proj" in n else t for n, t in tensors.items()}
        save_file(halves, checkpoint / "model.safetensors", metadata={"format": "pt"})
    packed(quantized(form), tmp_path / "codes", form)
    packed(checkpoint, tmp_path / "own", form)
    codes, own = Pack.open(tmp_path / "codes"), Pack.open(tmp_path / "own")
    assert codes.manifest.model_digest == own.manifest.model_digest


def test_doubly_quantized_scales_are_rounded_once(quantized: Quantized, tmp_path: Path) -> None:
    source = open_source(quantized("nf4, double"))
    pack = Pack.open(packed(quantized("nf4, double"), tmp_path / "pack", "nf4"))
    stored = load_file(pack.layer_path(1))["mlp.down.weight.absmax"].t()
    largest = source.layer_tensor(1, "mlp.down.weight").unflatten(1, (-1, 64)).abs().amax(-1)
    assert torch.equal(stored, largest.to(torch.bfloat16))


def test_matrices_that_are_stored_together_are_taken_apart(tmp_path: Path) -> None:
    checkpoint = quantize(family_checkpoint(tmp_path / "phi", "Phi-3 mini"), tmp_path / "quantized", "nf4, double")
    tokens = random_tokens(40, 320)
    (found,) = prompt_logits(resident_model(packed(checkpoint, tmp_path / "pack", "fp32")), [tokens])
    assert (found - computed_by_bitsandbytes(checkpoint, tokens)).abs().max() <= 1e-4
    assert Pack.open(packed(checkpoint, tmp_path / "nf4", "nf4")).scheme.name == "nf4"


@pytest.mark.parametrize(
    ("form", "scheme", "message"),
    [
        ("nf4", "int8", r"q\.weight is quantized in nf4; int8 would .* Pack it in nf4 or bf16 or fp32, or give"),
        ("int8", "nf4", "quantized in int8; nf4 would .* Pack it in int8 or bf16 or fp32"),
        ("fp4", "nf4", "quantized in fp4; nf4 would .* Pack it in bf16 or fp32"),
    ],
)
def test_nothing_is_quantized_twice(form: str, scheme: str, message: str, quantized: Quantized, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        write_pack(open_source(quantized(form)), tmp_path / "pack", scheme_named(scheme))
    assert not any(tmp_path.iterdir())


def test_scales_that_are_not_finite_are_not_packed(quantized: Quantized, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(quantized("int8"), tmp_path / "model"))
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.SCB"][3] = float("nan")
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    for scheme in ("int8", "bf16"):
        with pytest.raises(DataLossError, match=r"layers\.1\.mlp\.up\.weight .*not finite"):
            write_pack(open_source(checkpoint), tmp_path / scheme, scheme_named(scheme))


def test_codes_without_a_word_about_them_are_refused(quantized: Quantized, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(quantized("nf4"), tmp_path / "model"))
    assert json.loads((checkpoint / "config.json").read_text())["quantization_config"]["quant_method"] == "bitsandbytes"
    edit_json(checkpoint / "config.json", quantization_config=None)
    with pytest.raises(UnsupportedModelError, match=r"is stored as U8; .* give the unquantized checkpoint"):
        open_source(checkpoint)
