"""A whole GGUF file: a random Llama with its tokenizer and chat template."""

from pathlib import Path

import gguf
import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE = 64, 2, 4, 2, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"


def byte_alphabet() -> list[str]:
    """The 256 printable characters by which byte-level BPE writes bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))]


def write_gguf(path: Path, *, tied: bool) -> None:
    """A random Llama with 8-bit and 4-bit weights and a byte-level tokenizer."""
    tokens = [*SPECIAL, *byte_alphabet(), "he", "ll"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(7)

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0) -> None:
        values = random.standard_normal(shape).astype(np.float32) * 0.05
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    if not tied:
        add("output.weight", len(tokens), HIDDEN)
    for i in range(LAYERS):
        add(f"blk.{i}.attn_norm.weight", HIDDEN)
        add(f"blk.{i}.ffn_norm.weight", HIDDEN)
        add(f"blk.{i}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{i}.attn_k.weight", HIDDEN * KV_HEADS // HEADS, HIDDEN)
        add(f"blk.{i}.attn_v.weight", HIDDEN * KV_HEADS // HEADS, HIDDEN)
        add(f"blk.{i}.attn_output.weight", HIDDEN, HIDDEN, kind=gguf.GGMLQuantizationType.Q4_1)
        add(f"blk.{i}.ffn_gate.weight", INTERMEDIATE, HIDDEN, kind=gguf.GGMLQuantizationType.Q4_1)
        add(f"blk.{i}.ffn_up.weight", INTERMEDIATE, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, INTERMEDIATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
