"""The paged KV cache."""

from services.gpu_worker.cache.kv_cache import KVCache, kv_bytes_per_block, num_blocks_for

__all__ = ["KVCache", "kv_bytes_per_block", "num_blocks_for"]
