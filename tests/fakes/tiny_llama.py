"""Small random Llama models on disk, for tests that compare with Transformers' `generate` in float32."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCAB_SIZE = 300
EOS = 2

VARIANTS: dict[str, dict] = {
    "grouped_tied": {},
    "llama3_rope_biased": {
        "num_key_value_heads": 1,
        "head_dim": 24,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "linear_rope_one_to_one": {
        "num_key_value_heads": 6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
}


def write_tiny_llama(folder: Path, variant: str = "grouped_tied", *, max_shard_size: str = "1GB") -> LlamaForCausalLM:
    """Write a model folder and answer the same model as Transformers runs it.

    Biases and norms are random too, so that a tensor which is left out or mixed up changes the tokens.
    """
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**{**shape, **VARIANTS[variant]})).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def generate(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation by Transformers, EOS ignored."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()
