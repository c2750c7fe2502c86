"""Matrix products of Triton's interpreter as a GPU computes them: in one order, whatever the shape of the tile.

NumPy's products go through a BLAS, which may add in another order for another number of rows. On a GPU a row's sum does
not depend on its neighbours; tests that compare bits need the same.
"""

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def add_products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the rest of a test: `sum` of `a[:, k] * b[k]` by ascending k."""

    def create_dot(builder: InterpreterBuilder, a, b, d, input_precision, max_num_imprecise_acc) -> TensorHandle:
        kind = d.data.dtype
        left, right, total = a.data.astype(kind), b.data.astype(kind), np.zeros_like(d.data)
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[None, k]
        return TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
