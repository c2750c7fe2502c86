"""Models without a native path: any causal language model of Transformers whose attention goes through Transformers'
attention interface runs over the paged cache.

Its code computes everything but attention. The flat token batch goes through it as one sequence, with the positions of
the rows; keys and values never reach a cache of Transformers. `trial.check` proves at load time that this gives what
the model computes row by row, since a model may keep other state than keys and values.
"""

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from kernels.cache_write.api import cache_write
from kernels.paged_attention.api import implementation, paged_attention
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.models import trial
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.fields import Raw, end_ids, require, stored_dtype_name
from services.gpu_worker.models.model import ForwardInputs, largest_of
from shared.context_length import context_length
from shared.errors import ConfigError

ATTENTION = "pagewire"
"""Of our function in Transformers' registry. No mask is registered under it, so that models build none."""

_HARMLESS = frozenset({"dropout", "position_ids", "cache_position", "position_embeddings", "output_router_logits"})
"""Arguments that models hand to attention functions and that do not change what these compute."""


class TransformersModel:
    """A model of Transformers; `Model` says what its members mean."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        stored_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.stored_dtype = stored_dtype
        self.device = device
        self.attention_s = 0.0
        self._model = model
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def fingerprint(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        kind = f"transformers:{transformers.__version__}:{self.config.model_type}"
        return f"{self.device.type}-{dtype}-{kind}-attention:{implementation(self.device)}"

    @property
    def num_positions(self) -> int:
        return self.config.max_position_embeddings

    def forward_largest(self, inputs: ForwardInputs, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        return largest_of(self.forward(inputs, cache))

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> torch.Tensor:
        keep = inputs.sample_at
        options: dict[str, Any] = {"logits_to_keep": keep} if self._keeps_logits and keep is not None else {}
        step = PagedStep(inputs, cache)
        output = self._model(
            input_ids=inputs.token_ids[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            paged_step=step,
            **options,
        )
        self.attention_s = step.attention_s
        logits: torch.Tensor = output.logits[0]
        return (logits if keep is None or options else logits[keep]).float()


@dataclass(slots=True)
class PagedStep:
    """One step's batch and cache: travels through the model to its attention layers."""

    inputs: ForwardInputs
    cache: KVCache
    attention_s: float = 0.0

    def attend(
        self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        """[num_tokens, heads, head_dim] each -> attention of layer `index`; keys and values go to the cache."""
        kv = self.cache.layer(index)
        cache_write(key, value, *kv, self.inputs.slot_mapping)
        started = time.perf_counter()
        out = paged_attention(query.contiguous(), *kv, self.inputs.attention, **how)
        self.attention_s += time.perf_counter() - started
        return out


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_step: PagedStep | trial.Survey | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What Transformers calls in every attention layer.

    Args:
        query, key, value: [1, heads or kv_heads, num_tokens, head_dim].
        attention_mask: must be None: the batch says who sees whom.

    Returns:
        [1, num_tokens, heads, head_dim].

    Raises:
        ConfigError: an argument asks for what the paged kernels do not compute.
    """
    if paged_step is None:
        raise ConfigError("its layers do not hand arguments of a step on to their attention")
    unknown = sorted(name for name, value in others.items() if name not in _HARMLESS and _means_something(value))
    require(not unknown, f"its attention asks for {', '.join(unknown)}, which is not supported")
    require(attention_mask is None, "its attention brings a mask of its own, which is not supported")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    require(bool(causal), "its attention is not causal")
    index: Any = getattr(module, "layer_idx", None)
    require(isinstance(index, int), f"its attention ({type(module).__name__}) has no layer_idx")
    out = paged_step.attend(
        index,
        *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        soft_cap=softcap,
    )
    return out[None], None


def _means_something(value: object) -> bool:
    return value is not None and value is not False


def load_fallback(
    folder: Path,
    raw: Raw,
    generation: Raw,
    *,
    stored: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[float], None] | None = None,
) -> TransformersModel:
    """Load a folder with Transformers: safetensors only, no code from the folder.

    Args:
        raw, generation: the folder's `config.json` and `generation_config.json`.
        stored: the dtype that weights are rounded to.
        dtype: of activations.

    Raises:
        ConfigError: Transformers does not know the model or cannot load it, or it cannot run over the paged cache.
    """
    model = _load(folder, raw, stored).to(device=device, dtype=dtype).eval()
    text = model.config.get_text_config(decoder=True)
    try:
        survey = trial.survey(model, text)
        config = ModelConfig(
            model_type=str(raw.get("model_type")),
            vocab_size=int(text.vocab_size),
            hidden_size=int(text.hidden_size),
            intermediate_size=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
            num_layers=survey.num_layers,
            num_kv_heads=survey.num_kv_heads,
            head_dim=survey.head_dim,
            max_position_embeddings=_positions(raw, text),
            dtype=stored_dtype_name(raw),
            eos_token_ids=end_ids(raw, generation),
        )
        wrapped = TransformersModel(model, config, dtype=dtype, stored_dtype=stored, device=device)
        trial.check(wrapped)
    except ConfigError as error:
        raise ConfigError(f"model type {raw.get('model_type')!r} cannot run over the paged cache: {error}") from error
    if on_progress is not None:
        on_progress(1.0)
    return wrapped


def _load(folder: Path, raw: Raw, stored: torch.dtype) -> Any:
    require(not raw.get("quantization_config"), "config.json: quantization_config is not supported: give plain weights")
    transformers.utils.logging.disable_progress_bar()
    AttentionInterface.register(ATTENTION, attend)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=stored,
            attn_implementation=ATTENTION,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, KeyError, OSError, ImportError, RuntimeError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"Transformers cannot load model type {raw.get('model_type')!r}: {_first_line(error)}"
        ) from error
    for kind in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in report[kind])
        require(not names, f"the weights have {kind.replace('_', ' ')}: {', '.join(names[:5])}")
    return model


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _positions(raw: Raw, text: Any) -> int:
    length = context_length(raw) or getattr(text, "max_position_embeddings", None)
    require(isinstance(length, int), "config.json names no max_position_embeddings")
    return int(length or 0)
