"""A console whose reader has left."""

import os

import pytest
from rich.console import Console

from megatron_neobert.runtime.terminal import Terminal


def print_to_nobody(console: type[Console]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    try:
        console(file=stream).print("anybody?")
    finally:
        with pytest.raises(BrokenPipeError):  # what is still in its buffer
            stream.close()


def test_closed_pipe_is_not_an_error_of_our_own():
    with pytest.raises(BrokenPipeError):
        print_to_nobody(Terminal)
