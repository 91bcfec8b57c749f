"""Work that Ctrl-C must not cut short, since nobody could give back what it would leave behind."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["shielded"]


def shielded(work: Callable[[], object]) -> None:
    """Do work to its end; an interrupt that comes meanwhile is raised after it.

    Python interrupts its main thread alone, between any two steps, and after a long call into a
    library more likely than not: a pointer that the call returned is then lost. So the main thread
    waits, and another does the work, which notes what it takes where whoever cleans up finds it.

    Raises
    ------
    BaseException
        What the work raised; or else the first interrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        work()
        return
    raised: list[BaseException] = []
    interrupts: list[BaseException] = []
    claim, done = threading.Lock(), threading.Event()

    def once() -> None:
        if claim.acquire(blocking=False):
            try:
                work()
            except BaseException as error:
                raised.append(error)
            finally:
                done.set()

    worker = threading.Thread(target=once, name="tilewise-shielded")
    try:
        worker.start()
    except RuntimeError:  # there can be no more threads
        once()
    except KeyboardInterrupt as error:  # it may have begun, or never will
        interrupts.append(error)
        once()
    while True:
        try:
            done.wait()
            if worker.ident is not None:
                worker.join()
            break
        except KeyboardInterrupt as error:
            interrupts.append(error)
    for first in (*raised, *interrupts):
        raise first
