"""Work that no signal must cut short: nobody could give back what it would leave behind."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["shielded", "unmasked"]


def shielded(
    work: Callable[[], object],
    interrupted: Callable[[BaseException], object] = lambda _: None,
    meanwhile: Callable[[], object] | None = None,
) -> None:
    """Do work to its end; an interrupt that comes meanwhile is raised after it.

    Python interrupts its main thread alone, between any two steps, and after a long call into a
    library more likely than not: a pointer that the call returned is then lost. So the main thread
    waits, and another does the work, which notes what it takes where whoever cleans up finds it.

    Parameters
    ----------
    work : callable
    interrupted : callable, optional
        Called with an interrupt at once, so that the work can come to its end.
    meanwhile : callable, optional
        What the calling thread does while it waits, until the work lets it end; it raises nothing
        but interrupts.

    Raises
    ------
    BaseException
        What the work raised; or else the first interrupt.
    """
    if threading.current_thread() is not threading.main_thread() and meanwhile is None:
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
    except BaseException as error:
        found = unmasked(error)
        if not isinstance(found, RuntimeError):  # else there can be no more threads
            interrupts.append(found)
            interrupted(found)
        once()  # it may have begun, or never will
    while True:
        try:
            if interrupts:
                interrupted(interrupts[0])
            elif meanwhile is not None:
                meanwhile()
            done.wait()
            if worker.ident is not None:
                worker.join()
            break
        except BaseException as error:  # whatever a signal's handler raises
            interrupts.append(unmasked(error))
    for first in (*raised, *interrupts):
        raise first


def unmasked(error: BaseException) -> BaseException:
    """Return what a signal's handler raised if an error is only a consequence of it, or the error.

    Where such an interrupt comes while a thread waits for a `threading.Condition`, CPython may find
    the condition's lock released when it leaves it, and raise a RuntimeError about that instead.
    """
    hidden = error.__context__
    is_masked = isinstance(error, RuntimeError) and "un-acquired lock" in str(error)
    return hidden if is_masked and hidden is not None else error
