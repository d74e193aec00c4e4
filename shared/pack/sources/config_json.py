"""A Hugging Face `config.json`, mapped to a `ModelSpec`.

Every field is either understood, known to change nothing, or refused by name: an overlooked field would mean wrong
output without a word.
"""

from __future__ import annotations

from typing import Any

from shared.errors import UnsupportedModelError
from shared.model.spec import MOST_LAYERS, ModelSpec
from shared.pack.sources.config import Config, JsonObject
from shared.pack.sources.families import FAMILIES, Family
from shared.pack.sources.family_fields import head_dim
from shared.pack.sources.refusals import refuse_config

UNDERSTOOD = {
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    "rope_scaling", "rope_parameters", "tie_word_embeddings", "eos_token_id",
    "quantization_config",
}  # fmt: skip

ONLY_VALUE: JsonObject = {
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
    "attention_bias": False,
    "mlp_bias": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "is_decoder": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
}
"""Fields of which one value is understood, where a family does not say otherwise."""

WITHOUT_EFFECT = {
    # about training, or about how weights and outputs are held by other software
    "initializer_range", "attention_dropout", "pretraining_tp", "use_cache", "dtype", "torch_dtype",
    "transformers_version", "_name_or_path", "name_or_path", "is_llama_config", "output_attentions",
    "output_hidden_states", "return_dict", "torchscript", "use_bfloat16", "tf_legacy_loss", "_attn_implementation",
    "_attn_implementation_autoset", "_commit_hash", "chunk_size_feed_forward", "tie_encoder_decoder",
    "unsloth_version", "unsloth_fixed", "transformers.js_config", "auto_map",
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


def family_of_config(config: JsonObject, checkpoint: str) -> Family:
    """The family that a `config.json` belongs to.

    Raises:
        UnsupportedModelError: none that this version loads; the message says what the model is and what to do.
    """
    refuse_config(config, checkpoint)
    model_type, architectures = config.get("model_type"), config.get("architectures")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModelError(
            f"{checkpoint}: model_type is {model_type!r}; this version loads {', '.join(FAMILIES)}"
        )
    if architectures is not None and architectures != [family.architecture]:
        raise UnsupportedModelError(
            f"{checkpoint}: architectures is {architectures!r}; of {family.name} this version loads "
            f"{family.architecture!r} only"
        )
    return family


def spec_of_config(config: JsonObject, checkpoint: str) -> ModelSpec:
    """The spec that a `config.json` describes; absent fields have the defaults of the family's configuration.

    Raises:
        UnsupportedModelError: another architecture, a field or value with a meaning that this version does not know.
    """
    family = family_of_config(config, checkpoint)
    _check_fields(config, family, checkpoint)
    known = Config({"max_position_embeddings": 2048, **family.defaults, **config}, checkpoint)
    heads = known.integer("num_attention_heads")
    fields: dict[str, Any] = {
        "hidden_size": known.integer("hidden_size"),
        "intermediate_size": known.integer("intermediate_size"),
        "layers": known.integer("num_hidden_layers", most=MOST_LAYERS),
        "heads": heads,
        "kv_heads": known.integer("num_key_value_heads", heads),
        "head_dim": head_dim(known),
        "vocab_size": known.integer("vocab_size"),
        "context_length": known.integer("max_position_embeddings"),
        "norm_epsilon": known.number("rms_norm_eps", 1e-6),
        "tied_embeddings": known.flag("tie_word_embeddings"),
    }
    return ModelSpec(**fields | family.spec_fields(known))


def _check_fields(config: JsonObject, family: Family, checkpoint: str) -> None:
    understood = UNDERSTOOD | family.fields | {"architectures"}
    only_value = {name: only for name, only in {**ONLY_VALUE, **family.only}.items() if name not in understood}
    for name, only in only_value.items():
        value = config.get(name)
        if value is not None and value != only:
            raise UnsupportedModelError(f"{checkpoint}: {name} is {value!r}; this version loads {only!r} only")
    known = understood | family.without_effect | WITHOUT_EFFECT | only_value.keys()
    if unknown := sorted(name for name in config.keys() - known if config[name] is not None):
        raise UnsupportedModelError(
            f"{checkpoint}: config.json has fields that this version does not know: {', '.join(unknown)}; "
            "ignoring them could make its output wrong"
        )
