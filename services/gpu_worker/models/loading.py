"""From a model folder to a model on a device."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from kernels.linear.api import has_native_bfloat16
from services.gpu_worker.models.config import DecoderConfig
from services.gpu_worker.models.decoder import DecoderModel
from services.gpu_worker.models.families import is_native, parse_config
from services.gpu_worker.models.fields import Raw, end_ids, stored_dtype_name
from services.gpu_worker.models.model import Model
from services.gpu_worker.models.tokenizer_eos import eos_of_tokenizer
from services.gpu_worker.models.weights import Weights, open_weights
from shared.errors import ConfigError

QUANTIZATIONS = ("none", "int8", "gguf")
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    folder: Path,
    *,
    dtype: str,
    device: str,
    quantization: str = "none",
    max_model_len: int = 0,
    on_progress: Callable[[float], None] | None = None,
) -> Model:
    """Load the model of a Transformers folder (config.json and safetensors).

    Args:
        folder: a local folder.
        dtype: `auto` (as stored), `float32`, `bfloat16` or `float16`. See `compute_dtype` for what CPUs make of it.
        device: `cpu`, `cuda` or `cuda:<index>`.
        quantization: of weights: `none`, or on a CPU `int8`, or `gguf`: those of the folder's .gguf file in its blocks.
        max_model_len: the longest row that will be served, so that no table is made for more; 0: what the model was
            made for.
        on_progress: is told the share of the work that is done, 0 to 1.

    Raises:
        ConfigError: an unknown architecture, unsupported variant, unknown dtype or device, missing or damaged weights,
            a model or device without quantized products, or no .gguf file.
    """
    raw, generation = _read_folder(folder)
    place = _device(device)
    _check_quantization(quantization, raw, place)
    stored = stored_dtype(raw, dtype)
    computed = compute_dtype(stored, place)
    if not is_native(raw):
        # Transformers takes seconds to import: native models do without it.
        from services.gpu_worker.models.fallback import load_fallback

        return load_fallback(
            folder, raw, generation, stored=stored, dtype=computed, device=place, on_progress=on_progress
        )
    config = parse_config(raw, generation)
    with (
        _open(folder, config, quantization, dtype=computed, rounded_to=stored, device=place) as weights,
        torch.inference_mode(),
    ):
        return DecoderModel(
            config,
            weights,
            dtype=computed,
            stored_dtype=stored,
            device=place,
            is_int8=quantization == "int8",
            max_model_len=max_model_len,
            on_progress=on_progress,
        )


def _open(
    folder: Path,
    config: DecoderConfig,
    quantization: str,
    *,
    dtype: torch.dtype,
    rounded_to: torch.dtype,
    device: torch.device,
) -> AbstractContextManager[Weights]:
    if quantization != "gguf":
        return open_weights(folder, dtype=dtype, rounded_to=rounded_to, device=device)
    # other workers do without the library
    from services.gpu_worker.models.gguf_weights import gguf_file, open_gguf

    return open_gguf(gguf_file(folder), config, dtype)


def _check_quantization(quantization: str, raw: Raw, device: torch.device) -> None:
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization {quantization!r}: use {', '.join(QUANTIZATIONS)}")
    if quantization != "none" and device.type != "cpu":
        raise ConfigError(f"quantization {quantization} is for CPUs")
    if quantization != "none" and not is_native(raw):
        kind = raw.get("model_type")
        raise ConfigError(f"quantization {quantization}: not for model type {kind!r}, which Transformers computes")


def _read_folder(folder: Path) -> tuple[Raw, Raw]:
    """`config.json` and `generation_config.json`, which may be absent; one of them names the end, if anything does."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json")
    raw, generation = _read_json(folder / "config.json"), _read_optional(folder / "generation_config.json")
    if not end_ids(raw, generation):
        eos = eos_of_tokenizer(folder, _read_optional(folder / "tokenizer_config.json"))
        generation = {**generation, "eos_token_id": list(eos)}
    return raw, generation


def _read_optional(path: Path) -> Raw:
    return _read_json(path) if path.is_file() else {}


def stored_dtype(raw: Raw, dtype: str) -> torch.dtype:
    """The dtype to which weights are rounded; `raw` is the folder's configuration.

    Raises:
        ConfigError: `dtype` is none of the known names.
    """
    name = stored_dtype_name(raw) if dtype == "auto" else dtype
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r}: use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def compute_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of activations.

    A CPU without instructions for a 16-bit format multiplies it 3 to 8 times slower than float32 (2 cores, AVX-512,
    oneDNN: 40 against 240 GFLOP/s at 32 rows). There the weights keep their 16-bit values, but are held and multiplied
    as float32.
    """
    if device.type != "cpu" or (stored == torch.bfloat16 and has_native_bfloat16()):
        return stored
    return torch.float32


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} is not available: {error}") from error
    return device


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return content
