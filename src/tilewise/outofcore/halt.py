"""How the threads of one product wait for each other, stop each other, and are waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

__all__ = ["Halt", "Stopped"]


class Halt:
    """The first error of a product, and the conditions by which its threads wait for each other.

    All share one lock, and each is for one kind of thread: who wakes takes the interpreter's lock.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self._conditions: list[threading.Condition] = []
        self._at_work = 0
        self._may_end = threading.Condition(self.lock)
        self._news = self.condition()
        self._finished = 0  # tiles

    def condition(self) -> threading.Condition:
        made = threading.Condition(self.lock)
        self._conditions.append(made)
        return made

    def stop(self, error: BaseException) -> None:
        with self.lock:
            self.error = self.error or error
            for condition in self._conditions:
                condition.notify_all()

    def check(self) -> None:
        if self.error is not None:
            raise Stopped

    def wait(self, condition: threading.Condition) -> None:
        """Sleep until a condition may have changed, holding the lock."""
        self.check()
        condition.wait()
        self.check()

    def tell(self) -> None:
        """Say that a tile is finished."""
        with self.lock:
            self._finished += 1
            self._news.notify()

    def watch(self, report: Callable[[], object], tiles: int) -> None:
        """Call ``report`` whenever tiles are finished, until all are."""
        seen = 0
        while seen < tiles:
            with self.lock:
                while self._finished == seen:
                    self.wait(self._news)
                seen = self._finished
            report()

    def guarded(self, role: Callable[[], None]) -> None:
        """Do what a new thread is for, unless all is over before it begins."""
        with self.lock:
            if self.error is not None:
                return
            self._at_work += 1
        try:
            role()
        except Stopped:
            pass
        except BaseException as error:
            self.stop(error)
        finally:
            with self.lock:
                self._at_work -= 1
                self._may_end.notify_all()

    def join(self, workers: Sequence[threading.Thread]) -> None:
        """Wait for everyone, however often Ctrl-C is pressed: they use the caller's memory.

        It may have come when a thread was started and not known yet: such a one is waited for if it
        has begun, and does not begin if not.
        """
        while True:
            try:
                for worker in workers:
                    worker.join()
                with self.lock:
                    while self._at_work:
                        self._may_end.wait()
                return
            except KeyboardInterrupt as error:
                self.stop(error)


class Stopped(Exception):
    """Another thread failed; there is nothing to report."""
