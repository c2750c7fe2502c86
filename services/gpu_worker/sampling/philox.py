"""Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

A draw's random numbers are a function of (seed, choice, output index) and of nothing else: not of the batch, the
worker, the device or a restart. They are computed on the host, so they are the same everywhere.
"""

import numpy as np
import numpy.typing as npt

UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter: tuple[UInt64Array, ...], key: tuple[UInt64Array, ...]) -> tuple[UInt64Array, ...]:
    """Four 32-bit words per element.

    Args:
        counter: four arrays of 32-bit words, held in uint64.
        key: two arrays of 32-bit words, held in uint64.
    """
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low, high = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (high >> _HALF) ^ x1 ^ k0, high & _MASK, (low >> _HALF) ^ x3 ^ k1, low & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return x0, x1, x2, x3


def exponentials(
    seeds: npt.NDArray[np.int64], choices: npt.NDArray[np.int64], indices: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.float64]:
    """`count` independent exponential variables of rate 1 per element, at least 2**-33 and at most 23.

    Args:
        seeds, choices, indices: [n] int64, not negative: seed of the request, choice within it (its lower 32 bits
            count), output index.
        count: a multiple of 4.

    Returns:
        [n, count].
    """
    seed, choice, index = (column.astype(np.uint64)[:, None] for column in (seeds, choices, indices))
    group = np.arange(count // 4, dtype=np.uint64)[None]
    counter = np.broadcast_arrays(group, index & _MASK, index >> _HALF, choice & _MASK)
    words = philox4x32(tuple(counter), (seed & _MASK, seed >> _HALF))
    # The middle of each of 2**32 intervals: neither 0 nor 1.
    uniforms = (np.stack(words, -1).reshape(len(seed), count) + 0.5) * 2.0**-32
    return -np.log(uniforms)
