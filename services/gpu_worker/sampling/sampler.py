"""From logits to one token per row.

Order, as in vLLM: endings masked before `min_tokens`, logit_bias, penalties, then the largest logit for greedy rows,
and for the others temperature, min_p, top_k, top_p and a draw. A batch without any parameter takes one pass over the
logits.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling.api import FAN_OUT, num_levels, sample
from services.gpu_worker.sampling.penalties import TokenCounts
from services.gpu_worker.sampling.philox import exponentials
from services.gpu_worker.sampling.rows import Need, SamplingRows
from shared.sampling import SamplingParams

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row, on the device."""

    tokens: torch.Tensor
    """[n] int64; of no meaning where not ok."""
    ok: torch.Tensor
    """[n] bool: the row's logits were finite."""
    logprobs: torch.Tensor | None = None
    """[k] float32: log-softmax of the unchanged logits at the token, of the rows that ask for it; None if none does."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """Changes to a few logits of one row."""

    ids: IntArray
    values: npt.NDArray[np.float32]


def are_finite(values: torch.Tensor) -> torch.Tensor:
    """As `values.isfinite()`, which takes three times as many operations."""
    return (values - values) == 0


class Sampler:
    """Parameters and token counts of the batch's rows."""

    def __init__(self, num_rows: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._rows = SamplingRows(num_rows)
        self._counts = TokenCounts(num_rows, vocab_size, device)
        self._bias: dict[int, Sparse] = {}
        self._early_endings: dict[int, Sparse] = {}
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device

    def add(self, row: int, params: SamplingParams, prompt: IntArray, output: IntArray) -> None:
        """A request enters the batch with these known tokens."""
        self._rows.set(row, params)
        needs = self._rows.needs[row]
        if needs & Need.PENALTY:
            self._counts.add(row, prompt, output)
        if needs & Need.BIAS:
            ids, values = zip(*params.logit_bias, strict=True)
            self._bias[row] = Sparse(np.array(ids, np.int64), np.array(values, np.float32))
        if needs & Need.MIN_TOKENS:
            self._early_endings[row] = self._masked_endings(params)

    def add_greedy(self, row: int) -> None:
        """A request enters whose tokens are of no interest."""
        self._rows.set(row, SamplingParams(max_tokens=1, seed=0, temperature=0.0))

    def remove(self, row: int) -> None:
        """The row's request left."""
        self._counts.remove(row)
        self._bias.pop(row, None)
        self._early_endings.pop(row, None)

    def sample(self, logits: torch.Tensor, rows: IntArray, output_index: IntArray) -> Sampled:
        """One token per row.

        Args:
            logits: [n, vocab_size] float32; changed in place.
            rows: [n] distinct rows of the batch.
            output_index: [n], output tokens of each row so far.
        """
        asked = self.asked(rows)
        if not len(asked):
            return self._sample(logits, rows, output_index)
        at = self._to_device(asked)
        unchanged = logits[at]
        sampled = self._sample(logits, rows, output_index)
        chosen = unchanged.gather(1, sampled.tokens[at, None])[:, 0]
        return replace(sampled, logprobs=chosen - unchanged.logsumexp(-1))

    def is_greedy(self, rows: IntArray, output_index: IntArray) -> bool:
        """Whether the largest of their unchanged logits is all that these rows ask for."""
        return not self._needs(rows, output_index).any() and not len(self.asked(rows))

    def asked(self, rows: IntArray) -> IntArray:
        """Places within `rows` of those that ask for the log-probability of their token."""
        return np.flatnonzero(self._rows.with_logprobs[rows])

    def _sample(self, logits: torch.Tensor, rows: IntArray, output_index: IntArray) -> Sampled:
        needs = self._needs(rows, output_index)
        largest, tokens = logits.max(-1)
        ok = are_finite(largest)  # a NaN anywhere in the row is its maximum
        if not needs.any():
            return Sampled(tokens, ok)
        if (needs & ~Need.RANDOM).any():
            self._change(logits, rows, needs)
            tokens = logits.argmax(-1)
        drawn = np.flatnonzero(needs & Need.RANDOM)
        if len(drawn):
            at = self._to_device(drawn)
            of = None if len(drawn) == len(rows) else at
            tokens[at] = self._draw(logits, of, rows[drawn], output_index[drawn])
        counted = np.flatnonzero(needs & Need.PENALTY)
        if len(counted):
            self._counts.record(rows[counted], tokens[self._to_device(counted)])
        return Sampled(tokens, ok)

    def _needs(self, rows: IntArray, output_index: IntArray) -> IntArray:
        """What each row asks for beyond its largest logit."""
        needs = self._rows.needs[rows]
        if not needs.any():
            return needs
        return np.where(output_index < self._rows.min_tokens[rows], needs, needs & ~Need.MIN_TOKENS)

    def _change(self, logits: torch.Tensor, rows: IntArray, needs: IntArray) -> None:
        """Mask, bias and penalise in place."""
        self._apply_sparse(logits, rows, np.flatnonzero(needs & Need.MIN_TOKENS), self._early_endings)
        self._apply_sparse(logits, rows, np.flatnonzero(needs & Need.BIAS), self._bias)
        penalised = np.flatnonzero(needs & Need.PENALTY)
        if len(penalised):
            at, of = self._to_device(penalised), rows[penalised]
            columns = (self._rows.presence, self._rows.frequency, self._rows.repetition)
            logits[at] = self._counts.apply(logits[at], of, *(self._to_device(column[of]) for column in columns))

    def _apply_sparse(self, logits: torch.Tensor, rows: IntArray, places: IntArray, table: dict[int, Sparse]) -> None:
        """Add the sparse changes of the rows at `places`; -inf masks."""
        if not len(places):
            return
        changes = [table[int(rows[place])] for place in places]
        at = np.repeat(places, [len(change.ids) for change in changes])
        ids = np.concatenate([change.ids for change in changes])
        values = np.concatenate([change.values for change in changes])
        index = (self._to_device(at), self._to_device(ids))
        logits.index_put_(index, self._to_device(values), accumulate=True)

    def _draw(
        self, logits: torch.Tensor, at: torch.Tensor | None, rows: IntArray, output_index: IntArray
    ) -> torch.Tensor:
        """Tokens of the rows that are not greedy, whose logits lie at the places `at`, or at all: [n]."""
        columns = self._rows
        levels = num_levels(self._vocab_size)
        times = exponentials(columns.seed[rows], columns.choice[rows], output_index, levels * FAN_OUT)
        return sample(
            logits,
            temperature=self._to_device(columns.temperature[rows]),
            top_k=self._to_device(columns.top_k[rows]),
            top_p=self._to_device(columns.top_p[rows]),
            min_p=self._to_device(columns.min_p[rows]),
            times=self._to_device(times).view(len(rows), levels, FAN_OUT),
            rows=at,
        )

    def _masked_endings(self, params: SamplingParams) -> Sparse:
        """What must not end the row yet. With `ignore_eos` an EOS ends nothing, so it stays an ordinary token."""
        endings = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._eos_token_ids))
        ids = np.array(sorted(token for token in endings if 0 <= token < self._vocab_size), np.int64)
        return Sparse(ids, np.full(len(ids), -np.inf, np.float32))

    def _to_device(self, values: "npt.NDArray[np.generic]") -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)
