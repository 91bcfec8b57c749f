from __future__ import annotations

import threading
import time

from tilewise.outofcore.halt import Halt


def test_nobody_sees_what_an_error_left_half_done() -> None:
    halt, is_held, seen = Halt(), threading.Event(), []

    def fails() -> None:
        with halt:
            is_held.set()
            time.sleep(0.05)  # the other waits for the lock by then
            raise ValueError("half done")

    def follows() -> None:
        is_held.wait()
        with halt:
            seen.append(True)

    halt.start(fails)
    halt.start(follows)
    halt.join()
    assert isinstance(halt.error, ValueError)
    assert not seen


def test_an_error_wakes_who_sleeps() -> None:
    halt, is_asleep, woke = Halt(), threading.Event(), []
    condition = halt.condition()

    def sleeps() -> None:
        with halt:
            is_asleep.set()
            halt.wait(condition)
            woke.append(True)

    def fails() -> None:
        is_asleep.wait()
        with halt:  # the other has let go of it, so it sleeps
            raise ValueError("wake up")

    halt.start(sleeps)
    halt.start(fails)
    halt.join()
    assert isinstance(halt.error, ValueError)
    assert not woke
