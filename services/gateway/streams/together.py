"""Scripts that many tasks run at about the same time go to Redis together: one by one they cost much more CPU time."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio

MOST_TOGETHER = 16
SENDERS = 2
"""Round trips at a time: who comes while one is under way need not wait for it."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A command, and who waits for its answer."""

    command: Sequence[Any]
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Together:
    """`evalsha` and `eval` of a client. Who is cancelled takes nothing from the others: the command may have run."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._waiting: deque[_Call] = deque()
        self._senders: set[asyncio.Task[None]] = set()

    async def evalsha(self, sha: str, numkeys: int, *keys_and_args: Any) -> Any:
        """As the client's."""
        return await self._run("EVALSHA", sha, numkeys, *keys_and_args)

    async def eval(self, script: bytes, numkeys: int, *keys_and_args: Any) -> Any:
        """As the client's."""
        return await self._run("EVAL", script, numkeys, *keys_and_args)

    async def _run(self, *command: Any) -> Any:
        call = _Call(command)
        self._waiting.append(call)
        if len(self._senders) < SENDERS:
            sender = asyncio.create_task(self._send_all())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return await call.answer

    async def _send_all(self) -> None:
        while self._waiting:
            calls = [self._waiting.popleft() for _ in range(min(MOST_TOGETHER, len(self._waiting)))]
            if calls := [call for call in calls if not call.answer.done()]:
                await self._send(calls)

    async def _send(self, calls: Sequence[_Call]) -> None:
        answers: Sequence[Any]
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                for call in calls:
                    pipe.execute_command(*call.command)
                answers = await pipe.execute(raise_on_error=False)
        except Exception as error:  # each of those who wait decides what to do about it
            answers = [error] * len(calls)
        for call, answer in zip(calls, answers, strict=True):
            if call.answer.done():
                continue
            if isinstance(answer, Exception):
                call.answer.set_exception(answer)
            else:
                call.answer.set_result(answer)
