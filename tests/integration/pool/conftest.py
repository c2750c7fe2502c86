"""A gateway, a scheduler and content workers on a real Redis: everything but model and processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.gateway.text.tokenizer import TextTokenizer
from tests.fakes.gateway_server import RunningGateway
from tests.integration.gateway.conftest import byte_model, byte_tokenizer
from tests.integration.scheduler.conftest import Pool, pool

__all__ = ["byte_model", "byte_tokenizer", "pool"]


@pytest.fixture
def gateway(pool: Pool, byte_model: Path, byte_tokenizer: TextTokenizer) -> Iterator[RunningGateway]:
    """Not ready before scheduler and worker are."""
    with RunningGateway(byte_tokenizer, model=byte_model, redis_url=pool.url, pool=pool.keys.pool) as running:
        yield running
