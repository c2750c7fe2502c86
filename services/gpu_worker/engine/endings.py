"""Token-level endings of the batch's rows, in columns. The sampler masks what would end a row before `min_tokens`."""

import numpy as np
import numpy.typing as npt

from shared.messages import EndReason
from shared.sampling import SamplingParams

IntArray = npt.NDArray[np.int64]

_RUNS_ON = 0


class Endings:
    """When each row ends: EOS, then a stop token, then the length; the first that applies names the reason."""

    def __init__(self, num_rows: int, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = np.array(eos_token_ids, np.int64)
        self._max_tokens = np.zeros(num_rows, np.int64)
        self._ignores_eos = np.zeros(num_rows, np.bool_)
        self._has_stops = np.zeros(num_rows, np.bool_)
        self._stops: dict[int, frozenset[int]] = {}

    def add(self, row: int, params: SamplingParams) -> None:
        """A request enters."""
        self._max_tokens[row] = params.max_tokens
        self._ignores_eos[row] = params.ignore_eos
        self._has_stops[row] = bool(params.stop_token_ids)
        self._stops[row] = frozenset(params.stop_token_ids)

    def remove(self, row: int) -> None:
        """The row's request left."""
        self._stops.pop(row, None)

    def find(self, rows: IntArray, tokens: IntArray, output_index: IntArray, ok: npt.NDArray[np.bool_]) -> IntArray:
        """`EndReason` of each row that ends with its new token, else 0.

        Args:
            rows: [n] rows that yielded.
            tokens: [n] the new tokens.
            output_index: [n] index of the new token within the row's output.
            ok: [n] false where there is no usable token: the row ends with an error.
        """
        reasons = np.where(output_index + 1 >= self._max_tokens[rows], int(EndReason.LENGTH), _RUNS_ON)
        for place in np.flatnonzero(self._has_stops[rows]):
            if int(tokens[place]) in self._stops[int(rows[place])]:
                reasons[place] = EndReason.STOP_TOKEN
        is_eos = (tokens[:, None] == self._eos).any(1) & ~self._ignores_eos[rows]
        reasons[is_eos] = EndReason.EOS
        reasons[~ok] = EndReason.ERROR
        return reasons
