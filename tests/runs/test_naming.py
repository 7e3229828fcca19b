"""What processes are called, and how they ended."""

import os
import signal

import pytest

from mgpu.runs.naming import WRITER, ending, name_process, words_for


@pytest.mark.parametrize(
    "code, words",
    [
        (0, "ended with code 0"),
        (75, "ended with code 75"),
        (-9, "was killed by SIGKILL"),
        (-(signal.SIGRTMIN + 9), f"was killed by signal {signal.SIGRTMIN + 9}"),
    ],
)
def test_an_end_is_told_by_its_code(code, words):
    assert ending(code) == words


def test_a_named_process_is_known_and_another_is_a_child():
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        name_process(WRITER)
        os.write(ready[1], b"!")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    assert words_for(child) == "checkpoint writer"
    os.write(go[1], b"!")
    os.waitpid(child, 0)
    assert words_for(os.getpid()) == words_for(child) == "child process"
    for end in (*ready, *go):
        os.close(end)
