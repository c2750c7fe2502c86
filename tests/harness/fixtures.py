"""Fixtures of the tiers that run the whole stack."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Protocol

import pytest

from services.cli.ports import free_port
from services.cli.settings import load_settings
from shared.model_store import DEFAULT_MODEL, resolve
from tests.harness.reference_text import greedy_references, make_prompts
from tests.harness.stack import Stack, running_stack


class StartStack(Protocol):
    """Starts a stack with these flags of `pagewire up` (`block_size=16` is `--block-size 16`)."""

    def __call__(self, **flags: object) -> AbstractContextManager[Stack]: ...


@pytest.fixture(scope="session")
def model_home() -> Path:
    """The model cache that developers and tests share, so that the default model is converted once."""
    return load_settings({}).home.expanduser()


@pytest.fixture(scope="session")
def model_folder(model_home: Path) -> Path:
    """The default model; `make test` pulls it before the tests start."""
    folder = resolve(DEFAULT_MODEL, model_home).folder
    if folder is None:
        pytest.fail("the default model is missing: run `pagewire pull`")
    return folder


@pytest.fixture(scope="session")
def start_stack(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, model_home: Path) -> StartStack:
    numbers = count()

    def start(**flags: object) -> AbstractContextManager[Stack]:
        folder = tmp_path_factory.mktemp(f"stack{next(numbers)}")
        return running_stack(folder, free_port(), model_home, **flags)

    return start


@pytest.fixture(scope="session")
def stack(start_stack: StartStack) -> Iterator[Stack]:
    """One stack with default flags for all tests that only talk to it."""
    with start_stack() as running:
        yield running


@pytest.fixture(scope="session")
def float_stack(start_stack: StartStack) -> Iterator[Stack]:
    """As `stack`, with two gateways, in float32: greedy text does not depend on which requests share a step."""
    with start_stack(dtype="float32", gateways=2) as running:
        yield running


@pytest.fixture(scope="session")
def text_prompts(model_folder: Path) -> list[list[int]]:
    """Prompts of the lengths in reference_text.py."""
    return make_prompts(model_folder)


@pytest.fixture(scope="session")
def text_references(model_folder: Path, text_prompts: list[list[int]]) -> list[list[int]]:
    """What Transformers generates greedily for each of them alone."""
    return greedy_references(model_folder, text_prompts)
