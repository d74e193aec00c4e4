"""A Hugging Face `config.json` of the Llama family, mapped to a `ModelSpec`.

Every field is either understood, known to change nothing, or refused by name: an overlooked field would mean wrong
output without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.errors import UnsupportedModelError
from shared.model.spec import ModelSpec

JsonObject = Mapping[str, Any]

UNDERSTOOD = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "eos_token_id",
}  # fmt: skip

ONLY_VALUE: JsonObject = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "is_decoder": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
}
"""Fields of which this version understands one value."""

WITHOUT_EFFECT = {
    # about training, or about how weights and outputs are held by other software
    "initializer_range", "attention_dropout", "pretraining_tp", "use_cache", "dtype", "torch_dtype",
    "transformers_version", "_name_or_path", "name_or_path", "is_llama_config", "output_attentions",
    "output_hidden_states", "return_dict", "torchscript", "use_bfloat16", "tf_legacy_loss", "_attn_implementation",
    "_attn_implementation_autoset", "_commit_hash", "chunk_size_feed_forward", "tie_encoder_decoder",
    "unsloth_version", "unsloth_fixed", "transformers.js_config",
    # about other tasks
    "finetuning_task", "id2label", "label2id", "problem_type", "task_specific_params", "tokenizer_class", "prefix",
    # defaults for generating, which requests state themselves
    "bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "max_length", "min_length", "do_sample",
    "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens",
}  # fmt: skip

DEFAULT_ROPE_THETA = 10_000.0


def spec_of_config(config: JsonObject, checkpoint: str) -> ModelSpec:
    """The spec that a `config.json` describes; absent fields have the defaults of the Llama configuration.

    Raises:
        UnsupportedModelError: another architecture, a field or value with a meaning that this version does not know.
    """
    _check_fields(config, checkpoint)
    heads = _integer(config, "num_attention_heads", checkpoint)
    hidden_size = _integer(config, "hidden_size", checkpoint)
    return ModelSpec(
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size", checkpoint),
        layers=_integer(config, "num_hidden_layers", checkpoint),
        heads=heads,
        kv_heads=_integer(config, "num_key_value_heads", checkpoint, heads),
        head_dim=_integer(config, "head_dim", checkpoint, hidden_size // heads),
        vocab_size=_integer(config, "vocab_size", checkpoint),
        context_length=_integer(config, "max_position_embeddings", checkpoint, 2048),
        norm_epsilon=_number(config, "rms_norm_eps", checkpoint, 1e-6),
        rope_theta=_rope_theta(config, checkpoint),
        tied_embeddings=_flag(config, "tie_word_embeddings", checkpoint),
        attention_bias=_flag(config, "attention_bias", checkpoint),
        mlp_bias=_flag(config, "mlp_bias", checkpoint),
    )


def _check_fields(config: JsonObject, checkpoint: str) -> None:
    if "model_type" not in config:
        raise UnsupportedModelError(f"{checkpoint}: config.json has no model_type; this version loads 'llama'")
    for name, only in ONLY_VALUE.items():
        value = config.get(name)
        if value is not None and value != only:
            raise UnsupportedModelError(f"{checkpoint}: {name} is {value!r}; this version loads {only!r} only")
    known = UNDERSTOOD | WITHOUT_EFFECT | ONLY_VALUE.keys()
    if unknown := sorted(name for name in config.keys() - known if config[name] is not None):
        raise UnsupportedModelError(
            f"{checkpoint}: config.json has fields that this version does not know: {', '.join(unknown)}; "
            "ignoring them could make its output wrong"
        )


def _rope_theta(config: JsonObject, checkpoint: str) -> float:
    """From `rope_theta`, or from `rope_parameters` as newer configurations have it; any scaling is refused."""
    theta = _number(config, "rope_theta", checkpoint, DEFAULT_ROPE_THETA)
    for field in ("rope_scaling", "rope_parameters"):
        parameters = config.get(field)
        if parameters is None:
            continue
        if not isinstance(parameters, dict):
            raise UnsupportedModelError(f"{checkpoint}: {field} is {parameters!r}; expected an object")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind != "default":
            raise UnsupportedModelError(f"{checkpoint}: rotary scaling {kind!r} in {field}; this version has none")
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModelError(f"{checkpoint}: partial_rotary_factor in {field}; this version rotates all")
        understood = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        if unknown := sorted(parameters.keys() - understood):
            raise UnsupportedModelError(f"{checkpoint}: {field} has unknown fields: {', '.join(unknown)}")
        theta = _number(parameters, "rope_theta", checkpoint, theta)
    return theta


def _integer(config: JsonObject, name: str, checkpoint: str, default: int | None = None) -> int:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"{checkpoint}: {name} is {value!r}; expected a positive integer")
    return value


def _number(config: JsonObject, name: str, checkpoint: str, default: float) -> float:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UnsupportedModelError(f"{checkpoint}: {name} is {value!r}; expected a number")
    return float(value)


def _flag(config: JsonObject, name: str, checkpoint: str) -> bool:
    value = False if config.get(name) is None else config[name]
    if not isinstance(value, bool):
        raise UnsupportedModelError(f"{checkpoint}: {name} is {value!r}; expected true or false")
    return value
