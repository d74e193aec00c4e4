"""What is no model that can be packed, refused by its name before any work, with what to do instead."""

from __future__ import annotations

from pathlib import Path

from shared.errors import UnsupportedModelError
from shared.pack.sources.config import JsonObject

QUANTIZERS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "compressed-tensors": "compressed-tensors",
    "mxfp4": "MXFP4",
}
"""`quant_method` -> its name."""

ENCODERS = {
    "albert", "bert", "big_bird", "camembert", "clip", "deberta", "deberta-v2", "distilbert", "electra", "ernie",
    "esm", "eurobert", "funnel", "longformer", "modernbert", "mpnet", "nomic_bert", "roberta", "roformer", "siglip",
    "t5", "vit", "wav2vec2", "whisper", "xlm-roberta",
}  # fmt: skip
"""`model_type` of models that do not continue a text token by token from what came before."""

OTHER_TOWERS = {
    "vision_config": "a vision tower", "audio_config": "an audio tower", "vision_tower": "a vision tower",
    "mm_vision_tower": "a vision tower", "speech_config": "an audio tower",
}  # fmt: skip

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def refuse_folder(folder: Path) -> None:
    """Refuses a folder that is no model, or whose weights are in a form that is not read.

    Raises:
        UnsupportedModelError: an adapter, pickled weights, weights quantized by another program, or no configuration.
    """
    name = folder.resolve().name
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModelError(
            f"{name} is an adapter (LoRA), not a model; merge it into its base model and pack that"
        )
    for file, quantizer in (("quantize_config.json", "GPTQ"), ("quant_config.json", "AWQ")):
        if (folder / file).is_file():
            raise UnsupportedModelError(quantized_message(name, quantizer, file))
    if not any(folder.glob("*.safetensors")):
        pickled = (path for path in sorted(folder.iterdir()) if path.suffix in PICKLE_SUFFIXES)
        for path in pickled:
            raise UnsupportedModelError(pickle_message(path))
    if not (folder / "config.json").is_file():
        raise UnsupportedModelError(
            f"{name} has no config.json; expected a Hugging Face folder with config.json and safetensors files, "
            "or give the path of a GGUF file"
        )


def refuse_config(config: JsonObject, checkpoint: str) -> None:
    """Refuses a configuration of a model of another kind.

    Raises:
        UnsupportedModelError: quantized by another program, more than text, or an encoder.
    """
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization is not None and not is_bitsandbytes(config):
        method = str(quantization.get("quant_method")) if isinstance(quantization, dict) else ""
        raise UnsupportedModelError(
            quantized_message(checkpoint, QUANTIZERS.get(method, method), "quantization_config")
        )
    for field, tower in OTHER_TOWERS.items():
        if config.get(field) is not None:
            raise UnsupportedModelError(
                f"{checkpoint} has {tower} ({field}); this version packs text models: "
                "give the checkpoint of its language model alone"
            )
    if str(config.get("model_type")) in ENCODERS or config.get("is_encoder_decoder") is True:
        raise UnsupportedModelError(
            f"{checkpoint} is an encoder model (model_type {config.get('model_type')!r}); "
            "this version serves decoders, which write text: give one of those"
        )


def is_bitsandbytes(config: JsonObject) -> bool:
    """Whether a configuration says that matrices are quantized by bitsandbytes, which are read as they are."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "bitsandbytes"


def pickle_message(path: Path) -> str:
    """Why a pickled checkpoint is refused, and what to do."""
    return (
        f"{path.name} is a pickled checkpoint, and unpickling runs whatever code it holds; "
        "use the model's safetensors files, or convert it where it is safe to run"
    )


def quantized_message(checkpoint: str, quantizer: str, evidence: str) -> str:
    """Why a checkpoint of another program's codes is refused, and what to do."""
    return (
        f"{checkpoint} is quantized with {quantizer or 'another program'} ({evidence}); "
        "give the unquantized checkpoint, or a GGUF file of it"
    )
