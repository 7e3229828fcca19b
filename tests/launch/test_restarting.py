"""When a failed run is started again, by a table of invented endings."""

import dataclasses

import pytest

from mgpu.launch.diagnosis import Cause
from mgpu.launch.restarting import Ending, decide
from mgpu.spec import Span
from mgpu.spec.models import Restart

ERROR = Cause("error", 1, 1, "ValueError: bad sample 17", "train.py:3 in loss", step=6)
KILLED = Cause("killed", 1, 137, "was killed by SIGKILL", step=6)
THREE = Restart(max=3)


def after(*causes, progressed=True):
    return [Ending(cause, 100.0, progressed) for cause in causes]


def test_the_first_restart_is_at_once_and_the_next_ones_wait_longer():
    restarts, waits = [], []
    for number in range(9):
        waits.append(decide(Restart(max=9), after(KILLED), restarts, 100.0).wait)
        restarts.append(float(number))
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize(
    "limits, endings, restarts, why",
    [
        (Restart(), after(KILLED), [], ""),
        (THREE, after(KILLED, progressed=False), [], "no new checkpoint"),
        (THREE, after(dataclasses.replace(ERROR, deterministic=True)), [], "would come again"),
        (THREE, after(ERROR, KILLED, ERROR), [], "same error came at step 6"),
        (THREE, after(KILLED), [90.0, 95.0, 99.0], "3 of 3 restarts are used up"),
        (Restart(max=2, window=Span(10, "seconds")), after(KILLED), [91.0, 99.0], "within 10 seconds"),
    ],
)
def test_no_restart(limits, endings, restarts, why):
    decision = decide(limits, endings, restarts, 100.0)
    assert decision.wait is None
    assert why in decision.why


def test_what_is_no_repetition_is_started_again():
    assert decide(THREE, after(ERROR), [], 100.0).wait == 0
    assert decide(THREE, after(ERROR, dataclasses.replace(ERROR, step=8)), [], 100.0).wait == 0
    assert decide(THREE, after(KILLED, KILLED), [], 100.0).wait == 0
    assert decide(Restart(max=2, window=Span(10, "seconds")), after(KILLED), [10.0, 20.0], 100.0).wait == 0
