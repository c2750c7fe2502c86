"""What may follow a beam: the most probable tokens, in an order that no device decides.

As in Transformers' beam search: log-softmax of the unchanged logits; before `min_tokens` endings are masked afterwards,
so the other tokens keep their values; max(2, 1 + endings) times as many candidates as beams, so that enough remain when
the best of them end.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shared.sampling import SamplingParams

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Best:
    """Candidates of one row, best first, equal ones by token."""

    tokens: npt.NDArray[np.int32]
    """`-1 - token` for one that ends the row."""
    logprobs: npt.NDArray[np.float32]


class BeamSampler:
    """Endings of a model, and of the requests that search with beams."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)

    def best(self, logits: torch.Tensor, params: list[SamplingParams], output_index: IntArray) -> list[Best | None]:
        """Candidates of each row; None where the logits are not finite.

        Args:
            logits: [n, vocab_size] float32.
            params: of each row.
            output_index: [n], output tokens of each row so far.
        """
        finite = logits.amax(-1).isfinite().cpu().tolist()  # a NaN anywhere in the row is its maximum
        logprobs = logits.log_softmax(-1)
        endings = [self._endings(row) for row in params]
        for place, (row, index) in enumerate(zip(params, output_index.tolist(), strict=True)):
            if index < row.min_tokens and len(endings[place]):
                logprobs[place, torch.from_numpy(endings[place]).to(logits.device)] = -torch.inf
        return [
            self._best_of(logprobs[place], self._count(row, endings[place]), endings[place]) if finite[place] else None
            for place, row in enumerate(params)
        ]

    def _count(self, params: SamplingParams, endings: IntArray) -> int:
        """Even if all endings are among the first, `beam_width` tokens that go on are left."""
        width = params.beam_width
        return min(self._vocab_size, max(max(2, 1 + len(self._eos)) * width, width + len(endings)))

    def _best_of(self, logprobs: torch.Tensor, count: int, endings: IntArray) -> Best:
        """Which of several equal values `topk` picks is up to the device: all that reach the last one are looked at."""
        last = logprobs.topk(count).values[-1]
        tokens = ((logprobs >= last) & (logprobs > -torch.inf)).nonzero()[:, 0]
        values, ids = logprobs[tokens].cpu().numpy(), tokens.cpu().numpy()
        order = np.lexsort((ids, -values))[:count]
        chosen = ids[order]
        signed = np.where(np.isin(chosen, endings), -1 - chosen, chosen)
        return Best(signed.astype("<i4"), values[order].astype("<f4"))

    def _endings(self, params: SamplingParams) -> IntArray:
        """Token ids that end the row, ascending."""
        endings = set(params.stop_token_ids) | (set() if params.ignore_eos else self._eos)
        return np.array(sorted(token for token in endings if 0 <= token < self._vocab_size), np.int64)
