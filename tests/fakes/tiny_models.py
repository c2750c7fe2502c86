"""Small random models of many architectures on disk, and the same models as Transformers runs them, in float32."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3ForConditionalGeneration, PreTrainedModel

VOCAB_SIZE = 300
WINDOW = 24
"""Of layers with a sliding window; tests use contexts that are longer."""

_LLAMA_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEADS = {"head_dim": 24}
_GEMMA = {**_LLAMA_LIKE, **_HEADS, "num_hidden_layers": 4, "sliding_window": WINDOW, "tie_word_embeddings": True}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * index for index in range(6)],
    "long_factor": [4.0] * 6,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 128,
}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@dataclass(frozen=True)
class Tiny:
    """A model type and what of its configuration is not default."""

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)


NATIVE: dict[str, Tiny] = {
    "mistral": Tiny("mistral", {**_LLAMA_LIKE, **_HEADS, "sliding_window": WINDOW}),
    "mistral without window": Tiny("mistral", {**_LLAMA_LIKE, "sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": Tiny("qwen2", _LLAMA_LIKE),
    "qwen2 with windows": Tiny(
        "qwen2", {**_LLAMA_LIKE, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "qwen3": Tiny("qwen3", {**_LLAMA_LIKE, **_HEADS, "attention_bias": True}),
    "qwen3 with yarn": Tiny("qwen3", {**_LLAMA_LIKE, **_HEADS, "rope_parameters": _YARN}),
    "phi3": Tiny("phi3", {**_LLAMA_LIKE, "sliding_window": WINDOW}),
    "phi3 with longrope": Tiny(
        "phi3", {**_LLAMA_LIKE, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 128}
    ),
    "gemma2": Tiny(
        "gemma2",
        {**_GEMMA, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
    ),
    "gemma3": Tiny(
        "gemma3_text", {**_GEMMA, "layer_types": None, "rope_parameters": _GEMMA3_ROPE, "attention_bias": True}
    ),
}
"""Run by the native decoder."""

FALLBACK: dict[str, Tiny] = {
    "gpt2": Tiny(
        "gpt2",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 256,
            "initializer_range": 0.15,
        },
    ),
    "opt": Tiny(
        "opt",
        {
            **_LLAMA_LIKE,
            "ffn_dim": 96,
            "word_embed_proj_dim": 48,
            "do_layer_norm_before": True,
            "init_std": 0.15,
        },
    ),
    "gpt_neox": Tiny("gpt_neox", {**_LLAMA_LIKE, "rotary_pct": 0.5}),
    "mixtral": Tiny("mixtral", {**_LLAMA_LIKE, **_EXPERTS, "num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen3_moe": Tiny(
        "qwen3_moe", {**_LLAMA_LIKE, **_HEADS, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 48}
    ),
    "cohere2": Tiny("cohere2", {**_LLAMA_LIKE, "num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": None}),
}
"""Run by Transformers' code over the paged cache."""


def write_tiny(folder: Path, tiny: Tiny, **changes: Any) -> PreTrainedModel:
    """Write a model folder and answer the same model as Transformers runs it; `changes` go over its options.

    Every tensor is random, biases and norms too, so that one which is left out or mixed up changes the logits.
    """
    config = AutoConfig.for_model(tiny.model_type, **{**tiny.options, **changes})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return _randomized(model, folder)


def write_tiny_gemma3_with_vision(folder: Path) -> PreTrainedModel:
    """As Gemma 3 is published from 4B on: a decoder beside a vision tower."""
    text = {**NATIVE["gemma3"].options, "num_hidden_layers": 2}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 8}
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4, tie_word_embeddings=True
    )
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    return _randomized(Gemma3ForConditionalGeneration(config), folder)


def _randomized(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name or ".ln_" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


def logits_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[num_tokens, vocab_size]: of all tokens at once, as Transformers computes them."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]
