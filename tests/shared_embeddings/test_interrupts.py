"""SIGINT and SIGTERM: raised in a command, recorded in a training loop, delayed during writes."""

from __future__ import annotations

import os
import signal

import pytest

from shared_embeddings.utils.interrupts import (
    SIGNALS,
    Interrupted,
    Interrupts,
    signals_delayed,
    signals_raised,
)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_command_is_interrupted_and_handlers_come_back(number: int) -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    with signals_raised():
        with pytest.raises(Interrupted) as error:
            send(number)
        assert error.value.signal == number and error.value.status == 128 + number
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_the_first_signal_is_noted_and_the_second_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared_embeddings.utils.interrupts.ONE_REQUEST", -1)
    with signals_raised(), Interrupts() as interrupts:
        assert interrupts.received is None
        send(signal.SIGTERM)
        assert interrupts.received == signal.SIGTERM
        with pytest.raises(Interrupted):
            send(signal.SIGINT)


def test_signals_wait_for_the_end_of_a_write() -> None:
    written = []
    with signals_raised():
        with pytest.raises(Interrupted) as error, signals_delayed():
            send(signal.SIGTERM)
            send(signal.SIGINT)
            written.append("all")
    assert written == ["all"] and error.value.signal == signal.SIGTERM


def test_signals_that_come_together_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after Ctrl-C, which a terminal sends to a whole group, whose members may pass it on."""
    monkeypatch.setattr("shared_embeddings.utils.interrupts.ONE_REQUEST", 3600)
    with signals_raised(), Interrupts() as interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            send(number)
        assert interrupts.received == signal.SIGINT


def test_a_wait_ends_at_a_signal_and_at_one_that_was_noted() -> None:
    with signals_raised(), Interrupts() as interrupts:
        with pytest.raises(Interrupted), interrupts.raised_now():
            send(signal.SIGTERM)
        assert interrupts.received == signal.SIGTERM
        send(signal.SIGINT)  # the same request: nothing happens outside of a wait
        with pytest.raises(Interrupted) as error, interrupts.raised_now():
            raise AssertionError("the wait has begun")
        assert error.value.signal == signal.SIGTERM


def test_a_second_signal_waits_for_the_save_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared_embeddings.utils.interrupts.ONE_REQUEST", -1)
    with signals_raised(), Interrupts() as interrupts:
        send(signal.SIGTERM)
        saved = False
        with pytest.raises(Interrupted), signals_delayed():
            send(signal.SIGTERM)
            saved = True
        assert saved and interrupts.received == signal.SIGTERM


def test_ignored_signals_stay_ignored() -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals_raised(), signals_delayed():
            send(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, previous)
