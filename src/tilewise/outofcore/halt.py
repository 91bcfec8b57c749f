"""How the threads of one product wait for each other, stop each other, and are waited for."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

from .._shield import unmasked

__all__ = ["Halt", "Stopped"]


class Halt:
    """The first error of a product, and the conditions by which its threads wait for each other.

    All share one lock, and each is for one kind of thread: who wakes takes the interpreter's lock.
    ``with halt:`` holds the lock to change what the threads share. What is raised there stops all
    before the next one holds it, so nobody sees what an error left half done.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self._conditions: list[threading.Condition] = []
        self._at_work = 0
        self._may_end = threading.Condition(self.lock)
        self._news = self.condition()
        self._finished = 0  # tiles
        self._is_over = False

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.error is not None:
            self.lock.release()
            raise Stopped

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Stopped):
            self._stop(error)
        self.lock.release()

    def condition(self) -> threading.Condition:
        made = threading.Condition(self.lock)
        self._conditions.append(made)
        return made

    def stop(self, error: BaseException) -> None:
        with self.lock:
            self._stop(error)

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

    def watch(self, report: Callable[[], object]) -> None:
        """Call ``report`` when tiles are finished, until all is over; what it raises stops all."""
        seen = 0
        try:
            while True:
                with self.lock:
                    while self._finished == seen and not self._is_over:
                        self.wait(self._news)
                    if self._finished == seen:
                        return
                    seen = self._finished
                report()
        except Stopped:
            pass
        except BaseException as error:
            self.stop(unmasked(error))

    def start(self, role: Callable[[], None], count: int = 1) -> None:
        """Give new threads something to do; `join` waits for them.

        (`threading.Thread` waits until each of them runs, which takes several times as long.)
        """
        for _ in range(count):
            with self.lock:
                self._at_work += 1
            try:
                _thread.start_new_thread(self._do, (role,))
            except BaseException:
                self._leave()
                raise

    def join(self) -> None:
        """Wait until everyone has come to an end: they use the caller's memory."""
        with self.lock:
            while self._at_work:
                self._may_end.wait()
            self._is_over = True
            self._news.notify()

    def _stop(self, error: BaseException) -> None:
        self.error = self.error or error
        for condition in self._conditions:
            condition.notify_all()

    def _do(self, role: Callable[[], None]) -> None:
        try:
            self.check()
            role()
        except Stopped:
            pass
        except BaseException as error:
            self.stop(error)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self.lock:
            self._at_work -= 1
            if not self._at_work:
                self._may_end.notify()


class Stopped(Exception):
    """Another thread failed; there is nothing to report."""
