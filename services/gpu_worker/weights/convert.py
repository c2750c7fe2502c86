"""GGUF file → Transformers folder with bf16 safetensors."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.gpu_worker.weights.progress import Progress, Report
from shared.errors import ConfigError

if TYPE_CHECKING:
    import torch

_STEPS = 4


def convert_gguf(gguf: Path, target: Path, report: Report) -> None:
    """Write config, weights, tokenizer and chat template of `gguf` into the folder `target`. Touches no network.

    Raises:
        ConfigError: Transformers cannot read the file.
    """
    # several seconds and much memory: paid by a conversion only
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False}
    try:
        report(Progress("convert", 0, _STEPS, "tokenizer"))
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(target)
        report(Progress("convert", 1, _STEPS, "weights"))
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    except (ValueError, KeyError, OSError, ImportError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(f"cannot convert {gguf}: {error}") from error
    report(Progress("convert", 2, _STEPS, "bf16"))
    _write_weights(model, target)
    report(Progress("convert", 3, _STEPS, "config"))
    _write_config(model, target)
    report(Progress("convert", _STEPS, _STEPS))


def _write_weights(model: Any, target: Path) -> None:
    import torch
    from safetensors.torch import save_file

    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in _distinct(model.state_dict()).items()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _distinct(state: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
    """`state` without second names of one tensor (tied embeddings): the first name stays."""
    seen: set[int] = set()
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            kept[name] = tensor
    return kept


def _write_config(model: Any, target: Path) -> None:
    """The weights are plain from here on, so the configuration must not call them quantised."""
    import torch

    config = type(model.config)(**{k: v for k, v in model.config.to_dict().items() if k != "quantization_config"})
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(target)
    model.generation_config.save_pretrained(target)
