"""Tasks that outlive the HTTP request that started them."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from services.gateway.cancelling import cancel_and_wait

logger = logging.getLogger(__name__)


class Background:
    """Keeps a reference to each task until it ends."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background work failed: %s", type(error).__name__)

    async def close(self) -> None:
        """Cancel what still runs."""
        await cancel_and_wait(*self._tasks)
