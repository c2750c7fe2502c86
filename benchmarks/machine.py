"""What a machine can do at best, as measured (reading, arithmetic), and what a model could reach with it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FLAGS = {
    "amx_tile": "AMX",
    "avx512_bf16": "AVX512-BF16",
    "avx512_vnni": "AVX512-VNNI",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx2": "AVX2",
    "bf16": "NEON BF16",
    "asimddp": "NEON dot product",
    "asimd": "NEON",
}
"""What /proc/cpuinfo calls the instruction sets that matter here, and what people do."""


def instruction_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Those of the first core, best first; empty where nothing tells."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return tuple(name for flag, name in FLAGS.items() if flag in flags)


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured limits of all cores together."""

    read_bytes_per_s: float
    bf16_flop_per_s: float
    """Of bfloat16 products where the machine has instructions for them, else of float32 ones."""
    int8_op_per_s: float

    def row(self, level: str, sets: Sequence[str]) -> dict[str, float | str | None]:
        """For a table. `level` is what the kernels were compiled for, `sets` what the machine has."""
        return {
            "read GB/s": self.read_bytes_per_s / 1e9,
            "bf16 GFLOP/s": self.bf16_flop_per_s / 1e9,
            "int8 GOP/s": self.int8_op_per_s / 1e9,
            "kernels for": level,
            "instruction sets": ", ".join(sets) or "unknown",
        }


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of one request."""

    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a decoder's products with weights cost. Attention is left out: it is small at such lengths."""

    num_body: int
    """Weights that every token multiplies."""
    num_head: int
    """Those of the output head, which only sampled tokens multiply."""

    @classmethod
    def read(cls, folder: Path) -> "ModelSize":
        """From the `config.json` of a Llama-like model."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        mlp = 3 * hidden * config["intermediate_size"]
        return cls(config["num_hidden_layers"] * (attention + mlp), hidden * config["vocab_size"])

    def op_per_output(self, load: Load) -> float:
        """Operations for one output token of the load, its share of the prompt included."""
        forwarded = load.num_prompt + load.num_output - 1
        return 2 * (self.num_body * forwarded + self.num_head * load.num_output) / load.num_output

    def tokens_per_s(self, machine: Machine, load: Load, concurrency: int, *, bits: float, is_integer: bool) -> float:
        """The most output tokens a second: a step reads the weights once for all streams, products take their time."""
        read = machine.read_bytes_per_s / ((self.num_body + self.num_head) * bits / 8)
        peak = machine.int8_op_per_s if is_integer else machine.bf16_flop_per_s
        return min(concurrency * read, peak / self.op_per_output(load))
