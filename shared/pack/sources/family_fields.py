"""What each family's `config.json` says beyond sizes, norm epsilon and tied embeddings, as fields of a `ModelSpec`."""

from __future__ import annotations

from typing import Any

from shared.model.spec import LocalAttention, Multipliers
from shared.pack.sources.config import Config
from shared.pack.sources.rope_scaling import scaled_rope

SpecFields = dict[str, Any]

MOST_HEAD_DIM = 65_536
"""Bounds tables that have an entry for each dimension."""


def rope_fields(config: Config, dimensions: int | None = None, trained_context: int | None = None) -> SpecFields:
    """The spec's rotary embedding, from `rope_scaling` and `rope_theta` or, newer, `rope_parameters`.

    Args:
        dimensions: rotated dimensions of a head, where not all are.
    """
    parameters = config.object("rope_scaling") or config.object("rope_parameters") or Config({}, config.checkpoint)
    rope = scaled_rope(
        parameters,
        config.number("rope_theta", 10_000.0),
        dimensions or head_dim(config),
        config.integer("max_position_embeddings"),
        trained_context,
    )
    if dimensions is None and parameters.number("partial_rotary_factor", 1.0) != 1.0:
        config.refuse(f"{parameters.place}partial_rotary_factor is not 1; this family rotates whole heads")
    return rope.spec_fields


def head_dim(config: Config) -> int:
    """Stated, or what the hidden size leaves for each head."""
    heads = config.integer("num_attention_heads")
    return config.integer("head_dim", config.integer("hidden_size") // heads, most=MOST_HEAD_DIM)


def local_attention(
    config: Config, window: int | None, layers: list[int], rope_theta: float | None = None
) -> SpecFields:
    """Layers with a sliding window: those that `layer_types` names, otherwise those given; none without a window."""
    count = config.integer("num_hidden_layers")
    kinds = config.words("layer_types", count, ("full_attention", "sliding_attention"))
    if kinds is not None:
        layers = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
        if layers and window is None:
            config.refuse("layer_types names sliding_attention, but sliding_window is off")
    if window is None or not layers:
        return {}
    return {"local_attention": LocalAttention(window=window, layers=tuple(layers), rope_theta=rope_theta)}


def _biases(config: Config) -> SpecFields:
    return {name: config.flag(name) for name in ("attention_bias", "mlp_bias")}


def llama(config: Config) -> SpecFields:
    """Llama 1 to 3.3, SmolLM2, and many others that are stored as Llama."""
    return rope_fields(config) | _biases(config)


def _qwen_window(config: Config) -> SpecFields:
    if not config.flag("use_sliding_window"):
        return local_attention(config, None, [])
    layers = range(config.integer("num_hidden_layers"))[config.integer("max_window_layers") :]
    return local_attention(config, config.integer_or_none("sliding_window"), list(layers))


def qwen2(config: Config) -> SpecFields:
    """Biases of queries, keys and values only; some layers may see a window."""
    return rope_fields(config) | _qwen_window(config) | {"qkv_bias": True}


def qwen3(config: Config) -> SpecFields:
    """Norms of each query and key head."""
    return rope_fields(config) | _qwen_window(config) | _biases(config) | {"qk_norm": "head"}


def mistral(config: Config) -> SpecFields:
    """A window in all layers, or in none."""
    layers = list(range(config.integer("num_hidden_layers")))
    return rope_fields(config) | local_attention(config, config.integer_or_none("sliding_window"), layers)


def smollm3(config: Config) -> SpecFields:
    """Every fourth layer encodes no positions."""
    count = config.integer("num_hidden_layers")
    interval = config.integer("no_rope_layer_interval")
    rotated = config.fields.get("no_rope_layers")
    if rotated is None:
        rotated = [int((layer + 1) % interval != 0) for layer in range(count)]
    if not isinstance(rotated, list) or len(rotated) != count or any(flag not in (0, 1) for flag in rotated):
        config.refuse(f"no_rope_layers is {rotated!r}; expected {count} of 0 (not rotated) and 1 (rotated)")
    unrotated = [layer for layer, flag in enumerate(rotated) if not flag]
    window = config.integer_or_none("sliding_window") if config.flag("use_sliding_window") else None
    return (
        rope_fields(config)
        | _biases(config)
        | local_attention(config, window, unrotated)
        | {"unrotated_layers": tuple(unrotated)}
    )


def _gemma(config: Config) -> SpecFields:
    """What Gemma 2 and 3 share."""
    return {
        "attention_bias": config.flag("attention_bias"),
        "activation": "gelu_tanh",
        "norms": "both",
        "norm_plus_one": True,
        "multipliers": Multipliers(embedding=config.integer("hidden_size") ** 0.5),
        "attention_scale": config.number("query_pre_attn_scalar") ** -0.5,
        "logit_soft_cap": config.number_or_none("final_logit_softcapping"),
    }


def gemma2(config: Config) -> SpecFields:
    """Every other layer is local; attention scores and logits are capped."""
    local = list(range(0, config.integer("num_hidden_layers"), 2))
    return (
        rope_fields(config)
        | _gemma(config)
        | local_attention(config, config.integer_or_none("sliding_window"), local)
        | {"attention_soft_cap": config.number_or_none("attn_logit_softcapping")}
    )


def gemma3(config: Config) -> SpecFields:
    """Five of six layers are local, and rotate by a base of their own, without scaling."""
    pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
    local = [layer for layer in range(config.integer("num_hidden_layers")) if (layer + 1) % pattern]
    newer = config.object("rope_parameters") or Config({}, config.checkpoint)
    own = newer.object("sliding_attention") or Config({}, config.checkpoint)
    theta = own.number("rope_theta", config.number("rope_local_base_freq", 10_000.0))
    if own.fields.get("rope_type", "default") != "default":
        config.refuse(f"{own.place}rope_type is {own.fields['rope_type']!r}; local layers rotate without scaling")
    if newer.fields and not newer.fields.keys() <= {"full_attention", "sliding_attention"}:
        config.refuse(f"rope_parameters has {sorted(newer.fields)}; expected full_attention and sliding_attention")
    everywhere = {"rope_parameters": newer.fields.get("full_attention"), "rope_theta": config.number("rope_theta", 1e6)}
    return (
        rope_fields(Config({**config.fields, **everywhere}, config.checkpoint))
        | _gemma(config)
        | local_attention(config, config.integer_or_none("sliding_window"), local, theta)
        | {"qk_norm": "head"}
    )


def phi3(config: Config) -> SpecFields:
    """Part of a head may be rotated, by frequencies with divisors of their own."""
    layers = list(range(config.integer("num_hidden_layers")))
    parameters = config.object("rope_scaling") or config.object("rope_parameters") or Config({}, config.checkpoint)
    kind = parameters.fields.get("rope_type") or parameters.fields.get("type") or "default"
    if kind not in ("default", "longrope"):
        config.refuse(f"rotary scaling {kind!r}; for this family known are default, longrope")
    part = parameters.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    rotated = int(head_dim(config) * part)
    trained = config.integer("original_max_position_embeddings")
    return (
        rope_fields(config, rotated, trained)
        | local_attention(config, config.integer_or_none("sliding_window"), layers)
        | ({} if rotated == head_dim(config) else {"rotated_dimensions": rotated})
    )


def olmo2(config: Config) -> SpecFields:
    """Norms after attention and MLP, and of all queries and all keys together."""
    return rope_fields(config) | _biases(config) | {"norms": "after", "qk_norm": "projection"}


def granite(config: Config) -> SpecFields:
    """Llama, scaled by constants in four places."""
    multipliers = Multipliers(
        embedding=config.number("embedding_multiplier", 1.0),
        residual=config.number("residual_multiplier", 1.0),
        logits=1 / config.number("logits_scaling", 1.0),
    )
    scale = config.number("attention_multiplier", 1.0)
    return rope_fields(config) | _biases(config) | {"multipliers": multipliers, "attention_scale": scale}
