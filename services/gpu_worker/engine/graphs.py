"""Decode steps as CUDA graphs: the launches of a forward pass, recorded once per batch size and replayed as one.

A step with n rows runs as the next larger recorded size. What is recorded are addresses, so inputs are copied into
memory that stays; rows that only fill up have no context and no slot, so they read nothing and write nothing.
"""

from collections.abc import Callable

import torch

from kernels.launch import runs_triton
from kernels.paged_attention.gpu_batch import GpuBatch
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.engine.config import EngineConfig
from services.gpu_worker.models.decoder import DecoderModel
from services.gpu_worker.models.model import ForwardInputs, Model, largest_of

Pass = Callable[[], torch.Tensor]
"""A forward pass on inputs that stay where they are; the logits are valid until the next one."""
Record = Callable[[Pass], Pass]

_LONGEST_CONTEXT = 16384
"""Of a recorded step: its grid and its buffers of partial results are for this context, whatever the rows have."""


class DecodeGraphs:
    """Recorded decode steps of one model and cache."""

    def __init__(self, model: Model, cache: KVCache, config: EngineConfig, record: Record) -> None:
        self._model = model
        self._cache = cache
        self._record = record
        self._longest = min(config.max_model_len, _LONGEST_CONTEXT)
        self._sizes = recorded_sizes(config.max_num_seqs)
        self._inputs = StaticInputs(self._sizes[-1], -(-config.max_model_len // cache.block_size), model.device)
        self._passes: dict[int, Pass] = {}

    @torch.inference_mode()
    def record(self) -> None:
        """Record every size. Overwrites nothing that is of interest: no row has a slot."""
        for size in reversed(self._sizes):  # the smaller ones fit the memory of the largest
            inputs = self._inputs.of_size(size, self._longest)

            def forward(inputs: ForwardInputs = inputs) -> torch.Tensor:
                return self._model.forward(inputs, self._cache)

            forward()  # compiles what is not compiled yet, which a recording cannot hold
            self._passes[size] = self._record(forward)

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> torch.Tensor:
        """As `Model.forward`; a step that was not recorded, with chunks or a longer context, runs as it is."""
        batch, count = inputs.attention, len(inputs.token_ids)
        size = next((size for size in self._sizes if size >= count), None)
        if not isinstance(batch, GpuBatch) or len(batch.chunks) or size not in self._passes:
            return self._model.forward(inputs, cache)
        if batch.longest_context > self._longest:
            return self._model.forward(inputs, cache)
        self._inputs.fill(inputs, batch, size)
        return self._passes[size]()[:count]

    def forward_largest(self, inputs: ForwardInputs, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Model.forward_largest`."""
        return largest_of(self.forward(inputs, cache))


def graphs_for(model: Model, cache: KVCache, config: EngineConfig) -> DecodeGraphs | None:
    """On CUDA, for the native decoder; other models may look at values on the host, which a recording cannot hold."""
    if not runs_triton(cache.data) or not isinstance(model, DecoderModel):
        return None
    return DecodeGraphs(model, cache, config, cuda_recorder())


def recorded_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then every multiple of 8, up to the first that holds all rows."""
    sizes = [1, 2, 4, *range(8, max_num_seqs + 8, 8)]
    return [size for size, smaller in zip(sizes, [0, *sizes], strict=False) if smaller < max_num_seqs]


class StaticInputs:
    """Inputs of a decode step at addresses that stay."""

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._slots = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        self._context_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._ones = torch.ones(max_rows, dtype=torch.int32, device=device)

    def of_size(self, size: int, longest_context: int) -> ForwardInputs:
        """The first `size` rows."""
        batch = GpuBatch(
            num_tokens=size,
            query_starts=self._rows[:size],
            query_lens=self._ones[:size],
            context_lens=self._context_lens[:size],
            singles=self._rows[:size],
            chunks=self._rows[:0],
            block_tables=self._tables[:size],
            longest_context=longest_context,
            longest_chunk=0,
        )
        return ForwardInputs(self._token_ids[:size], self._positions[:size], self._slots[:size], batch, None)

    def fill(self, inputs: ForwardInputs, batch: GpuBatch, size: int) -> None:
        """Copy a step in; rows from its last to `size` stand for none."""
        count = len(inputs.token_ids)
        self._token_ids[:count].copy_(inputs.token_ids)
        self._positions[:count].copy_(inputs.positions)
        self._slots[:count].copy_(inputs.slot_mapping)
        self._context_lens[:count].copy_(batch.context_lens)
        self._tables[:count, : batch.block_tables.shape[1]].copy_(batch.block_tables)
        self._slots[count:size].fill_(-1)
        self._context_lens[count:size].zero_()


def cuda_recorder() -> Record:
    """Records into graphs that share their memory."""
    pool = torch.cuda.graph_pool_handle()

    def record(forward: Pass) -> Pass:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = forward()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay

    return record
