"""Streams of other libraries: what is taken for one and what is not."""

from __future__ import annotations

from typing import Any

import pytest

from tilewise.errors import OptionError
from tilewise.runtime import streams


class Protocol:
    """An object with the protocol, as a method or as a value, whatever it gives."""

    def __init__(self, given: Any) -> None:
        self.__cuda_stream__ = given


@pytest.mark.parametrize("stream", [None, Protocol((0, 1)), Protocol(lambda: (0, 1))])
def test_the_default_stream(stream: Any) -> None:
    assert streams.handle_of(stream, 0) == streams.DEFAULT == 1


def test_the_other_default_streams_keep_their_handles() -> None:
    assert streams.handle_of(Protocol((0, 0)), 0) == 0
    assert streams.handle_of(Protocol((0, 2)), 0) == 2


@pytest.mark.parametrize(
    "stream",
    [7, "default", object(), Protocol(None), Protocol(1), Protocol((0, "x")), Protocol((0, 1, 2))],
)
def test_what_is_no_stream_is_refused(stream: Any) -> None:
    with pytest.raises(OptionError, match=r"is not a stream: .*from_handle"):
        streams.handle_of(stream, 0)


def test_another_version_of_the_protocol_is_refused() -> None:
    with pytest.raises(OptionError, match="speaks version 1"):
        streams.handle_of(Protocol((1, 1)), 0)
