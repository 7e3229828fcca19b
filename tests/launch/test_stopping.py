"""What a node makes of the signals it is sent, and of its lifeline."""

import os
import signal

import pytest

from mgpu.launch.stopping import SignalRelay, StopRequest
from mgpu.runs.requests import STOP_SIGNALS


@pytest.fixture
def request_to_stop():
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    read, write = os.pipe()
    stop = StopRequest(read)
    stop.listen()
    yield stop, write
    for signum, handler in before.items():
        signal.signal(signum, handler)
    os.close(read)


def test_the_first_signal_says_how_the_run_ends(request_to_stop):
    stop, _ = request_to_stop
    assert not stop.look()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.look()
    assert (stop.signum, stop.is_urgent, stop.is_preemption) == (signal.SIGTERM, False, False)


def test_one_interrupt_on_two_ways_is_one_and_two_on_one_way_are_urgent(request_to_stop):
    stop, write = request_to_stop
    os.write(write, bytes([signal.SIGINT]))
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.look() and not stop.is_urgent
    os.write(write, bytes([signal.SIGINT]))
    assert stop.look() and stop.is_urgent


def test_a_repeated_term_is_not_urgent(request_to_stop):
    stop, write = request_to_stop
    os.write(write, bytes([signal.SIGTERM, signal.SIGTERM]))
    assert stop.look() and not stop.is_urgent


@pytest.mark.parametrize("preempt", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_only_the_configured_notice_means_a_preemption(request_to_stop, preempt):
    stop, _ = request_to_stop
    stop.preempt = preempt
    for other in {signal.SIGUSR1, signal.SIGUSR2} - {preempt}:
        os.kill(os.getpid(), other)
    assert not stop.look()
    os.kill(os.getpid(), preempt)
    assert stop.look() and stop.is_preemption


def test_a_front_that_is_gone_is_noticed(request_to_stop):
    stop, write = request_to_stop
    stop.look()
    assert not stop.is_orphaned
    os.close(write)
    assert not stop.look()
    assert stop.is_orphaned


def test_what_the_front_heard_before_there_was_a_node_is_handed_on_in_order():
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        relay, handed = SignalRelay(), []
        relay.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGHUP)
        relay.connect(handed.append)
        os.kill(os.getpid(), signal.SIGTERM)
        assert handed == [signal.SIGUSR1, signal.SIGINT, signal.SIGTERM]
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
