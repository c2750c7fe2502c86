"""The persistent batch: rows that stay where they are while plans change a few of them.

What a step needs of every row is in numpy columns, so that a step in which nothing joins or leaves handles arrays,
never rows one by one. Tokens known so far: prompt and output. A row is FREE, in PREFILL (its `pending` tokens are
computed in chunks), in DECODE (each step computes its last token, which lies in device memory, and yields one more) or
a BEAM (beams.py: all of its tokens are computed; it moves only when a plan names it).
"""

from collections.abc import Mapping
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


class RowState(IntEnum):
    """What a row does."""

    FREE = 0
    PREFILL = 1
    DECODE = 2
    BEAM = 3


class BlockTables:
    """Block ids of every row, on the host and on the device; on a CPU both are one memory."""

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device) -> None:
        self.host = np.zeros((num_rows, max_blocks), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int64)
        shared = torch.from_numpy(self.host)
        self.device = shared if device.type == "cpu" else shared.to(device)

    @property
    def max_blocks(self) -> int:
        """Blocks that a row can hold."""
        return self.host.shape[1]

    def clear(self, row: int) -> None:
        """The row owns no block any more."""
        self.num_blocks[row] = 0

    def append(self, pairs: IntArray) -> None:
        """Append (row, block_id) pairs [n, 2] in order."""
        for row, block in pairs.tolist():
            self.host[row, self.num_blocks[row]] = block
            self.num_blocks[row] += 1
        self._send(pairs[:, 0])

    def read(self, row: int) -> IntArray:
        """A copy of the row's block ids."""
        return self.host[row, : self.num_blocks[row]].astype(np.int64)

    def of(self, rows: IntArray, num_blocks: int) -> torch.Tensor:
        """At least the first `num_blocks` entries of each of `rows`, on the device: no more of them than whole
        sixteens, which Triton kernels are compiled for."""
        whole = self.device[:, : -(-num_blocks // 16) * 16]
        return whole.index_select(0, torch.from_numpy(rows).to(self.device.device))

    def replace(self, tables: Mapping[int, IntArray]) -> None:
        """Give rows other tables."""
        for row, blocks in tables.items():
            self.host[row, : len(blocks)] = blocks
            self.num_blocks[row] = len(blocks)
        self._send(np.array(list(tables), np.int64))

    def _send(self, changed: IntArray) -> None:
        """Bring rows to the device, if it has a memory of its own."""
        if self.device.device.type != "cpu":
            rows = torch.from_numpy(np.unique(changed))
            self.device[rows.to(self.device.device)] = torch.from_numpy(self.host)[rows].to(self.device.device)

    def slots(self, rows: IntArray, positions: IntArray, block_size: int) -> IntArray:
        """Slot of one position of each row: `block_id * block_size + offset`."""
        blocks = self.host[rows, positions // block_size].astype(np.int64)
        return blocks * block_size + positions % block_size


class Batch:
    """Rows `0 … max_num_seqs - 1` and what is known of each."""

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device) -> None:
        self.state = np.zeros(num_rows, np.int8)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.num_computed = np.zeros(num_rows, np.int64)
        """Of rows in prefill."""
        self.is_joined = np.zeros(num_rows, np.bool_)
        """Whether the row yielded since it was added, so that readers of the log know it."""
        self.is_unusable = np.zeros(num_rows, np.bool_)
        """The request cannot be computed as it stands: it ends with an error instead of its first token."""
        self.searches = np.zeros(num_rows, np.bool_)
        """Belongs to a beam search: yields candidates instead of tokens."""
        self.request_ids: list[str] = [""] * num_rows
        self.pending: list[IntArray | None] = [None] * num_rows
        """All known tokens of rows in prefill."""
        self.tables = BlockTables(num_rows, max_blocks, device)
        self.last_token = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """[max_num_seqs]: the token that a decode row or a named beam computes next. That of a decode row never leaves
        the device for it."""
        self._decode_rows: IntArray | None = None

    @property
    def num_rows(self) -> int:
        return len(self.state)

    @property
    def decode_rows(self) -> IntArray:
        """Rows in DECODE, ascending; kept until a row enters or leaves that state."""
        if self._decode_rows is None:
            self._decode_rows = np.flatnonzero(self.state == RowState.DECODE)
        return self._decode_rows

    def add(self, row: int, request_id: str, tokens: IntArray, num_prompt: int, num_computed: int) -> None:
        """A request enters in prefill."""
        self.state[row] = RowState.PREFILL
        self.num_tokens[row] = len(tokens)
        self.num_prompt[row] = num_prompt
        self.num_computed[row] = num_computed
        self.is_joined[row] = False
        self.is_unusable[row] = False
        self.searches[row] = False
        self.request_ids[row] = request_id
        self.pending[row] = tokens
        self.tables.clear(row)

    def remove(self, row: int) -> None:
        """The row is free."""
        if self.state[row] == RowState.DECODE:
            self._decode_rows = None
        self.state[row] = RowState.FREE
        self.pending[row] = None
        self.tables.clear(row)

    def start_decode(self, rows: IntArray) -> None:
        """The last chunk of these rows is computed."""
        self._decode_rows = None
        self._end_prefill(rows, RowState.DECODE)

    def start_beams(self, rows: IntArray) -> None:
        """The last chunk of these rows is computed."""
        self._end_prefill(rows, RowState.BEAM)

    def _end_prefill(self, rows: IntArray, state: RowState) -> None:
        self.state[rows] = state
        for row in rows.tolist():
            self.pending[row] = None
