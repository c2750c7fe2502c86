"""All settings of one worker process, read once from the environment (`PAGEWIRE_…`)."""

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.model_store import DEFAULT_HOME, DEFAULT_MODEL


class Settings(BaseSettings):
    """What a worker can be told. Sizes left at 0 are derived from the model and the machine."""

    model_config = SettingsConfigDict(env_prefix="PAGEWIRE_", extra="ignore")

    redis_url: str = "redis://127.0.0.1:6379/0"
    pool: str = "default"
    name: str = Field("worker-0", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """The seat: stable over restarts."""
    instance: str = Field("", pattern=r"^[A-Za-z0-9._-]{0,64}$")
    """Unique per process start; drawn at random if a supervisor gave none."""

    model: str = DEFAULT_MODEL
    home: Path = DEFAULT_HOME
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: bfloat16 on CUDA and on CPUs that compute in it, else float32."""
    quantization: Literal["none", "int8", "gguf"] = "none"
    """`int8`: weights with a scale per output feature, activations with one per token and 64 features. `gguf`: weights
    as the model's GGUF file holds them, in blocks; activations with a scale per token and block. CPUs only."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")

    block_size: int = Field(16, ge=1, le=1024)
    num_blocks: int = Field(0, ge=0)
    kv_cache_memory: int = Field(0, ge=0)
    """Bytes of KV cache, if `num_blocks` is 0."""
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """`auto`: what the model computes in or is stored as; `int8`, on GPUs `fp8`: codes, a scale per token and head."""
    num_cpu_blocks: int = Field(0, ge=0)
    """Blocks of the host pool, for swapped requests and demoted prefixes."""
    swap_space: float = Field(0.0, ge=0, allow_inf_nan=False)
    """GiB of host pool, instead of `num_cpu_blocks`."""
    cpu_cache_dtype: Literal["auto", "int8"] = "auto"
    """What the host pool stores: `auto` exactly what the KV cache holds; `int8` less, but text may change."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory for weights, activations and KV cache together."""
    max_num_seqs: int = Field(64, ge=1, le=65536)
    max_num_batched_tokens: int = Field(512, ge=1)
    max_model_len: int = Field(0, ge=0)
    """Context in tokens; 0: what the model was made for."""

    worker_index: int = Field(0, ge=0)
    num_workers: int = Field(1, ge=1)
    """Workers on this machine: cores, GPUs and memory are divided among them."""
    compute_niceness: int = Field(5, ge=0, le=19)
    """Added to the niceness of the compute threads, so that whatever moves messages runs first."""
    drain_grace_s: float = Field(25.0, ge=0)
    """On SIGTERM: longest time until its requests have moved or ended. (Kubernetes kills after 30.)"""
    fault_dir: str = ""
    """Of fault tests only: see `shared/fault_points.py`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("swap_space")
    @classmethod
    def _check_host_pool(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("num_cpu_blocks"):
            raise ValueError("num_cpu_blocks is given already: use one of the two")
        return value
