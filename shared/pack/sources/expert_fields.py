"""What the `config.json` of families with experts says, as fields of a `ModelSpec`."""

from __future__ import annotations

from shared.model.spec import MOST_EXPERTS, Experts
from shared.pack.sources.config import Config
from shared.pack.sources.family_fields import SpecFields, local_attention, rope_fields


def mixtral(config: Config) -> SpecFields:
    """Mistral's attention; weights always sum to 1, and stay in float32."""
    layers = list(range(config.integer("num_hidden_layers")))
    return (
        rope_fields(config)
        | local_attention(config, config.integer_or_none("sliding_window"), layers)
        | {"experts": _experts(config, count=8, normalized=True, rounded=False)}
    )


def qwen3_moe(config: Config) -> SpecFields:
    """Norms of each query and key head; a window, where there is one, in all layers."""
    layers = list(range(config.integer("num_hidden_layers")))
    _check_every_layer_has_experts(config)
    window = config.integer_or_none("sliding_window") if config.flag("use_sliding_window") else None
    return (
        rope_fields(config)
        | local_attention(config, window, layers)
        | {
            "intermediate_size": config.integer("moe_intermediate_size"),
            "attention_bias": config.flag("attention_bias"),
            "qk_norm": "head",
            "experts": _experts(config, count=128, normalized=config.flag("norm_topk_prob"), rounded=True),
        }
    )


def olmoe(config: Config) -> SpecFields:
    """Norms of all queries and all keys together, which are clamped afterwards where the model asks for it."""
    return rope_fields(config) | {
        "attention_bias": config.flag("attention_bias"),
        "qk_norm": "projection",
        "qkv_clip": config.number_or_none("clip_qkv"),
        "experts": _experts(config, count=64, normalized=config.flag("norm_topk_prob"), rounded=True),
    }


def _experts(config: Config, *, count: int, normalized: bool, rounded: bool) -> Experts:
    """Their number goes by two names, which mean the same.

    Args:
        count: where neither is stated.
    """
    stated = [name for name in ("num_local_experts", "num_experts") if config.fields.get(name) is not None]
    numbers = {config.integer(name, most=MOST_EXPERTS) for name in stated} or {count}
    if len(numbers) > 1:
        config.refuse(f"num_local_experts is {config.fields['num_local_experts']}, but num_experts differs")
    (found,) = numbers
    chosen = config.integer("num_experts_per_tok")
    if chosen > found:
        config.refuse(f"num_experts_per_tok is {chosen}, but each layer has {found} experts")
    return Experts(count=found, chosen=chosen, normalized=normalized, rounded=rounded)


def _check_every_layer_has_experts(config: Config) -> None:
    step, without = config.integer("decoder_sparse_step", 1), config.fields.get("mlp_only_layers") or []
    if step != 1:
        config.refuse(f"decoder_sparse_step is {step}; this version loads models whose layers all have experts")
    if without:
        config.refuse(f"mlp_only_layers is {without!r}; this version loads models whose layers all have experts")
