"""Rows of beam searches: the worker computes what may follow each sequence, the scheduler chooses among it.

    prompt prefilled ──candidates──▶ scheduler ──beams──▶ rows made anew from their parents ──candidates──▶ …

All tokens of a beam have their KV. In the plan that names it, it becomes its parent's sequence, as that was before the
plan, and one token more; the parent's blocks are shared, only the last one may be another (a copy, if siblings write
to it too).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.gpu_worker.engine.batch import Batch, RowState
from services.gpu_worker.sampling.candidates import BeamSampler
from shared.messages import BeamRow, Candidates, EndReason
from shared.sampling import SamplingParams

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Parent:
    """A beam as it was before the plan."""

    request_id: str
    params: SamplingParams
    num_tokens: int
    num_prompt: int
    blocks: IntArray
    is_unusable: bool


@dataclass(frozen=True, slots=True)
class BeamOutcome:
    """What a pass yielded for beams."""

    candidates: tuple[Candidates, ...] = ()
    ended: tuple[tuple[int, int], ...] = ()
    """(row, EndReason.ERROR) of rows that cannot go on."""


class Beams:
    """The batch's rows with `params.beam_width > 0`."""

    def __init__(self, batch: Batch, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._batch = batch
        self._params: dict[int, SamplingParams] = {}
        self._sampler = BeamSampler(vocab_size, eos_token_ids)

    def enter(self, row: int, params: SamplingParams) -> None:
        """A request that was just added to the batch searches with beams."""
        self._batch.searches[row] = True
        self._params[row] = params

    def remove(self, row: int) -> None:
        """The row left, if it was one."""
        self._params.pop(row, None)

    def read_parents(self, beams: tuple[BeamRow, ...]) -> list[Parent]:
        """The parent of each of `beams`. Before the plan changes anything."""
        batch, params = self._batch, self._params
        return [
            Parent(
                batch.request_ids[beam.parent],
                params[beam.parent],
                int(batch.num_tokens[beam.parent]),
                int(batch.num_prompt[beam.parent]),
                batch.tables.read(beam.parent),
                bool(batch.is_unusable[beam.parent]),
            )
            for beam in beams
        ]

    def make(self, beams: tuple[BeamRow, ...], parents: list[Parent]) -> IntArray:
        """Make the named rows what the plan says; answers them."""
        rows = np.array([beam.row for beam in beams], np.int64)
        if not beams:
            return rows
        for beam, parent in zip(beams, parents, strict=True):
            self._make(beam, parent)
        batch = self._batch
        batch.tables.replace({beam.row: parent.blocks for beam, parent in zip(beams, parents, strict=True)})
        device = batch.last_token.device
        tokens = torch.tensor([beam.token for beam in beams], dtype=torch.int64, device=device)
        batch.last_token[torch.from_numpy(rows).to(device)] = tokens
        return rows

    def _make(self, beam: BeamRow, parent: Parent) -> None:
        batch, row = self._batch, beam.row
        batch.state[row] = RowState.BEAM
        batch.request_ids[row] = parent.request_id
        batch.num_tokens[row] = parent.num_tokens + 1
        batch.num_prompt[row] = parent.num_prompt
        batch.is_unusable[row] = parent.is_unusable
        batch.is_joined[row] = False
        batch.searches[row] = True
        self._params[row] = parent.params
        if beam.block != -1:
            parent.blocks[-1] = beam.block

    def advance(self, logits: torch.Tensor, rows: IntArray) -> BeamOutcome:
        """Candidates of rows that were computed; those that cannot go on are still in the batch.

        Args:
            logits: [n, vocab_size] float32.
            rows: [n] beams, or rows whose prefill completed: they become beams.
        """
        batch = self._batch
        batch.start_beams(rows)
        output_index = batch.num_tokens[rows] - batch.num_prompt[rows]
        found = self._sampler.best(logits, [self._params[row] for row in rows.tolist()], output_index)
        usable = {
            row: best
            for row, best in zip(rows.tolist(), found, strict=True)
            if best is not None and not batch.is_unusable[row]
        }
        return BeamOutcome(
            tuple(Candidates(row, best.tokens.tobytes(), best.logprobs.tobytes()) for row, best in usable.items()),
            tuple((row, int(EndReason.ERROR)) for row in rows.tolist() if row not in usable),
        )
