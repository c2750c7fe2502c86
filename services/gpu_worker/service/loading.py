"""From settings to an engine that is warmed up. The first module of the service that imports torch."""

import logging
import time

import torch

from kernels.native.library import MISSING, current
from kernels.paged_attention.api import implementation
from services.gpu_worker.cache.host_pool import HostPool, allocate_pool, encodes, pool_bytes_per_block
from services.gpu_worker.cache.kv_cache import KVCache, cache_dtype, check_setting, kv_bytes_per_block
from services.gpu_worker.engine import Engine, EngineConfig
from services.gpu_worker.models.loading import load_model
from services.gpu_worker.models.model import Model
from services.gpu_worker.service.memory import GIB, CacheRequest, blocks_in_host_pool, blocks_on_cpu, blocks_on_gpu
from services.gpu_worker.service.partition import Partition
from services.gpu_worker.service.worker import Capacity, LoadedWorker, LoadProgress
from services.gpu_worker.settings import Settings
from shared.errors import ConfigError
from shared.model_store import ResolvedModel

log = logging.getLogger(__name__)

_WEIGHTS_SHARE = 0.8
"""Of the progress bar; the rest is warm-up."""


def load_worker(
    settings: Settings, resolved: ResolvedModel, partition: Partition, report: LoadProgress
) -> LoadedWorker:
    """Load the model, reserve the KV cache, warm up.

    Raises:
        ConfigError: not pulled yet, not supported, or no room for it.
    """
    started = time.monotonic()
    set_num_threads(partition.num_threads)
    device = choose_device(settings.device, settings.worker_index)
    check_setting(settings.kv_cache_dtype, torch.device(device))
    model = load_model(
        resolved.require_folder(),
        dtype=settings.dtype,
        device=device,
        quantization=settings.quantization,
        max_model_len=settings.max_model_len,
        on_progress=lambda share: report(_WEIGHTS_SHARE * share),
    )
    config = EngineConfig(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=context_length(settings.max_model_len, model),
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )
    kinds = (model.stored_dtype, model.dtype)
    dtype = cache_dtype(*kinds, model.config, settings.block_size, model.device, settings.kv_cache_dtype)
    num_blocks = _num_blocks(settings, model, config, dtype)
    cache = KVCache.allocate(model.config, num_blocks, settings.block_size, dtype, device)
    pool = _host_pool(settings, model, cache)
    engine = Engine(model, cache, config, pool=pool)
    engine.warm_up()
    capacity = Capacity(
        num_blocks=num_blocks,
        block_size=settings.block_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        fingerprint=fingerprint(model, dtype, settings.cpu_cache_dtype if pool.num_blocks else "auto"),
        model=resolved.served_name,
        num_cpu_blocks=pool.num_blocks,
        block_bytes=cache.bytes_per_block,
        warning=missing_kernels(model.device),
    )
    log.info("loaded on %d threads in %.1f s: %s", partition.num_threads, time.monotonic() - started, capacity)
    return LoadedWorker(engine, capacity)


def set_num_threads(number: int) -> None:
    """Threads that compute: torch's, and those of the C++ kernels, which inherit this thread's cores and niceness."""
    torch.set_num_threads(number)
    library = current()
    if library is not None:
        library.set_num_threads(number)


def choose_device(setting: str, worker_index: int) -> str:
    """The device of worker `worker_index`: with `auto` or `cuda`, workers take the GPUs in turn.

    Raises:
        ConfigError: a GPU is asked for that is not there.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "cpu" or (setting == "auto" and num_gpus == 0):
        return "cpu"
    index = int(setting.partition(":")[2]) if ":" in setting else worker_index % max(num_gpus, 1)
    if index >= num_gpus:
        raise ConfigError(f"device {setting!r}: {num_gpus} GPUs are available to this torch {torch.__version__}")
    return f"cuda:{index}"


def context_length(setting: int, model: Model) -> int:
    """The longest row: what the model was made for, or less if told so.

    Raises:
        ConfigError: more than the model's position embeddings cover.
    """
    longest = model.config.max_position_embeddings
    if setting > longest:
        raise ConfigError(f"max_model_len {setting} is more than the {longest} positions of the model")
    return setting or longest


def fingerprint(model: Model, kv_dtype: torch.dtype, cpu_cache_dtype: str = "auto") -> str:
    """Numerics: workers with equal ones continue each other's requests token by token."""
    level = torch.backends.cpu.get_cpu_capability() if model.device.type == "cpu" else _gpu_name(model.device)
    lossy = f"-cpu-cache:{cpu_cache_dtype}" if encodes(kv_dtype, cpu_cache_dtype) else ""
    kv = str(kv_dtype).removeprefix("torch.")
    return f"{model.fingerprint}-kv:{kv}-torch:{torch.__version__}-{level}{lossy}"


def missing_kernels(device: torch.device) -> str:
    """What to do about it if torch computes in place of our kernels; empty if it does not."""
    if implementation(device) != "torch":
        return ""
    return MISSING if device.type == "cpu" else "Triton is not installed: torch computes, several times slower"


def _gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device).replace(" ", "_")


def _num_blocks(settings: Settings, model: Model, config: EngineConfig, dtype: torch.dtype) -> int:
    request = CacheRequest(settings.num_blocks, settings.kv_cache_memory, settings.num_workers)
    bytes_per_block = kv_bytes_per_block(model.config, settings.block_size, dtype)
    if model.device.type == "cpu":
        return blocks_on_cpu(request, bytes_per_block)
    free, total = torch.cuda.mem_get_info(model.device)
    return blocks_on_gpu(
        request,
        bytes_per_block,
        free=free - activation_bytes(model, config),
        total=total,
        utilization=settings.gpu_memory_utilization,
    )


def _host_pool(settings: Settings, model: Model, cache: KVCache) -> HostPool:
    size = pool_bytes_per_block(model.config, settings.block_size, cache.data.dtype, settings.cpu_cache_dtype)
    num_blocks = blocks_in_host_pool(settings.num_cpu_blocks, int(settings.swap_space * GIB), size)
    return allocate_pool(cache, num_blocks, settings.cpu_cache_dtype)


def activation_bytes(model: Model, config: EngineConfig) -> int:
    """Room that a step needs beside weights and cache: a bound from the largest tensors of a forward pass.

    Per token about four times the widest layer's activations in the model's dtype; per sampled row the logits in
    float32, four times over (logits, probabilities, sorted, indices).
    """
    widest = 2 * model.config.intermediate_size + 4 * model.config.hidden_size
    tokens = config.max_num_batched_tokens + config.max_num_seqs
    return 4 * tokens * widest * model.dtype.itemsize + 16 * config.max_num_seqs * model.config.vocab_size
