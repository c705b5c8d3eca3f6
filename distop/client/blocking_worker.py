"""A worker loop with plain functions for handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distop.client.loop_thread import close, next_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from distop.client import async_worker
    from distop.client.blocking_client import Client
    from distop.client.loop_thread import Loop


class Job:
    """A job that a worker holds: :class:`distop.client.async_worker.Job` with blocking methods."""

    def __init__(self, loop: Loop, inner: async_worker.Job) -> None:
        self._loop = loop
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner.owned, name)

    @property
    def lost(self) -> bool:
        """Whether another claimant has it, or its operation is being cancelled: stop."""
        return self._inner.lost

    def complete(self, result: Any = None) -> None:
        """Return it as a success. Raises as :meth:`Client.return_job`, as the other returns do."""
        self._loop.run(self._inner.complete(result))

    def abort(self, message: str, result: Any = None) -> None:
        """Return it as failed, with a verdict: it is not retried."""
        self._loop.run(self._inner.abort(message, result))

    def retry(self, error: str = "") -> None:
        """Return it for a retry after an unexpected error."""
        self._loop.run(self._inner.retry(error))

    def release(self) -> None:
        """Release it, as if it had not been claimed."""
        self._loop.run(self._inner.release())


class Worker:
    """The blocking form of :class:`distop.client.async_worker.Worker`, which documents the options.

    Handlers are plain functions, each called in its own thread; or use ``for job in worker``. An interrupt of
    :meth:`run` releases the held jobs.
    """

    def __init__(self, client: Client, handlers: Mapping[str, Callable[[Job], Any]] | Iterable[str], **options: Any):
        self._loop = client._loop
        loop = self._loop

        def wrapped(handler: Callable[[Job], Any]) -> Callable[[async_worker.Job], Any]:
            return lambda inner: handler(Job(loop, inner))

        async def make() -> async_worker.Worker:
            from distop.client.async_worker import Worker as Inner

            given: Any = handlers
            if isinstance(handlers, dict):
                given = {name: wrapped(one) if callable(one) else one for name, one in handlers.items()}
            return Inner(client._inner, given, **options)

        self._inner = self._loop.run(make())

    @property
    def actor(self) -> str:
        """The name under which jobs are claimed."""
        return self._inner.actor

    def run(self) -> None:
        """Call the handlers until :meth:`stop`, which another thread or a handler calls."""
        self._loop.run(self._inner.run())

    def stop(self) -> None:
        """Stop claiming: :meth:`run` and the iteration end after the held jobs are returned."""

        async def stop() -> None:
            self._inner.stop()

        self._loop.run(stop())

    def __iter__(self) -> Iterator[Job]:
        stream = self._inner.__aiter__()
        try:
            while True:
                found = self._loop.run(next_of(stream))
                if found is None:
                    return
                yield Job(self._loop, found)
        finally:
            self._loop.run(close(stream))
