"""Presence, frequency and repetition penalties, and the token counts that they need.

Counts are kept only for rows that ask for a penalty, in places that are handed out as such rows come and go. They are
rebuilt from the row's tokens when it joins, so a row that returns after a preemption continues with equal counts.
"""

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


class TokenCounts:
    """Per place: how often each token occurs in the output, and whether it occurs in the prompt."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._place = np.full(num_rows, -1, np.int64)
        self._free: list[int] = []
        self._output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def add(self, row: int, prompt: IntArray, output: IntArray) -> None:
        """Start counting for `row`."""
        if not self._free:
            self._grow()
        place = self._free.pop()
        self._place[row] = place
        counts = np.bincount(output, minlength=self._vocab_size).astype(np.int32)
        self._output[place] = torch.from_numpy(counts).to(self._device)
        self._prompt[place] = False
        self._prompt[place, torch.from_numpy(prompt).to(self._device)] = True

    def remove(self, row: int) -> None:
        """Stop counting for `row`, if it was counted."""
        if self._place[row] >= 0:
            self._free.append(int(self._place[row]))
            self._place[row] = -1

    def record(self, rows: IntArray, tokens: torch.Tensor) -> None:
        """Count one output token for each of `rows`, which are all counted."""
        self._output.index_put_((self._places(rows), tokens), self._one, accumulate=True)

    def apply(
        self,
        logits: torch.Tensor,
        rows: IntArray,
        presence: torch.Tensor,
        frequency: torch.Tensor,
        repetition: torch.Tensor,
    ) -> torch.Tensor:
        """Penalised logits of `rows`.

        Args:
            logits: [n, vocab_size] float32.
            rows: [n], all counted.
            presence, frequency, repetition: [n] float32.
        """
        places = self._places(rows)
        counts = self._output[places]
        produced = counts > 0
        divisor = torch.where(produced | self._prompt[places], repetition[:, None], 1.0)
        logits = torch.where(logits > 0, logits / divisor, logits * divisor)
        return logits - frequency[:, None] * counts - presence[:, None] * produced

    @property
    def _one(self) -> torch.Tensor:
        return torch.ones((), dtype=torch.int32, device=self._device)

    def _places(self, rows: IntArray) -> torch.Tensor:
        return torch.from_numpy(self._place[rows]).to(self._device)

    def _grow(self) -> None:
        size = len(self._output)
        more = max(4, size)
        self._output = torch.cat((self._output, self._output.new_zeros(more, self._vocab_size)))
        self._prompt = torch.cat((self._prompt, self._prompt.new_zeros(more, self._vocab_size)))
        self._free.extend(range(size + more - 1, size - 1, -1))
