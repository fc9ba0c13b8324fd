"""`ResponseTasks`: responses that run in the background, with no connection that waits for them."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class ResponseTasks:
    """The tasks of one application by (tenant, id of the response); used on the event loop only."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def start(self, tenant: str, response_id: str, run: Coroutine[Any, Any, None]) -> None:
        """Run until it ends; its errors are its own business."""
        key = tenant, response_id
        task = asyncio.create_task(run, name=response_id)
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def cancel(self, tenant: str, response_id: str) -> bool:
        """End a response and wait for it; return whether it was running."""
        task = self._tasks.get((tenant, response_id))
        if task is None:
            return False
        task.cancel()
        await asyncio.wait({task})
        return True

    async def close(self) -> None:
        """End all responses."""
        for key in list(self._tasks):
            await self.cancel(*key)
