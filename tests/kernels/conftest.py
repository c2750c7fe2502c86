"""Fixtures for kernels: each native one is tested at every dispatch level that this machine has."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernels.native.library import Library, built_levels, open_library, using
from tests.harness.interpreter import add_products_in_order


@pytest.fixture(params=[level.name for level in built_levels()])
def native(request: pytest.FixtureRequest) -> Iterator[Library]:
    """The library of one level, on two threads; operations compute with it."""
    library = open_library(request.param)
    before = library.num_threads
    library.set_num_threads(2)
    with using(request.param):
        yield library
    library.set_num_threads(before)


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh float tensors are full of NaN, so that an output that a kernel forgets is seen."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of the interpreter do not depend on the shape of a tile."""
    add_products_in_order(monkeypatch)
