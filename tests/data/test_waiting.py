"""Waits for data: said aloud with what is known, handed on as they end, left when the process is asked to stop."""

import queue
import threading
import time

import pytest

from nsa.data import waiting
from nsa.data.sources.base import Tally
from nsa.data.waiting import Activity, Limit, Waiter, WaitStopped
from nsa.errors import DataUnavailableError

LIMIT = Limit(0.3, "data.timeout_s")


def never(timeout):
    time.sleep(timeout)
    raise queue.Empty


def waiter(reports, what=None, **more):
    return Waiter(0.1, lambda seconds, message: reports.append((seconds, message)), lambda: what, **more)


def test_what_takes_long_is_reported_until_it_is_there():
    reports = []
    found = waiter(reports, "text: 3 of 9 parts tokenised").run(lambda: time.sleep(0.55) or 7, "the source to open")
    assert found == 7
    assert 3 <= len(reports) <= 6
    seconds, message = reports[0]
    assert message == f"data: waiting for the source to open since {seconds:.1f} s; text: 3 of 9 parts tokenised"
    assert [s for s, _ in reports] == sorted(s for s, _ in reports)


def test_what_is_quick_is_not_reported():
    reports = []
    assert [waiter(reports).run(lambda n=n: n * n, "a square") for n in range(5)] == [0, 1, 4, 9, 16]
    assert not reports


@pytest.mark.parametrize("error", [TimeoutError("slow disk"), DataUnavailableError("gone")])
def test_an_error_comes_out_as_it_was_raised(error):
    def fail():
        raise error

    with pytest.raises(type(error), match=str(error)):
        waiter([]).run(fail, "an error")


def test_nothing_for_too_long_ends_the_wait_and_anything_that_arrives_prolongs_it():
    began = time.monotonic()
    remedy = r"nothing arrived for 0\.3 s: .* more time with data\.timeout_s"
    with pytest.raises(DataUnavailableError, match=rf"waiting for a batch since 0\.\d s; {remedy}"):
        waiter([]).wait(never, "a batch", limit=LIMIT)
    assert time.monotonic() - began < 5
    began = time.monotonic()
    with pytest.raises(DataUnavailableError):
        waiter([], arrived=lambda: min(5, int(10 * (time.monotonic() - began)))).wait(never, "a batch", limit=LIMIT)
    assert time.monotonic() - began >= 0.8, "something arrived up to 0.5 s"


def test_a_wait_is_left_when_asked_to_stop_but_not_for_what_comes_in_a_moment(monkeypatch):
    monkeypatch.setattr(waiting, "GRACE_S", 0.6)
    asked = waiter([], stopped=lambda: True)
    assert asked.run(lambda: time.sleep(0.3) or "there", "a moment") == "there"
    released = threading.Event()
    began = time.monotonic()
    with pytest.raises(WaitStopped):
        asked.run(lambda: released.wait(30), "an hour")
    assert 0.6 <= time.monotonic() - began < 5
    released.set()


def test_a_thread_that_nobody_waits_for_any_more_ends_with_its_work(monkeypatch):
    monkeypatch.setattr(waiting, "GRACE_S", 0.0)
    released = threading.Event()
    with pytest.raises(WaitStopped):
        waiter([], stopped=lambda: True).run(lambda: released.wait(30), "an hour")
    (left,) = [thread for thread in threading.enumerate() if thread.name.startswith("data-wait")]
    released.set()
    left.join(5)
    assert not left.is_alive()


class Remote:
    name = "hub"

    def __init__(self):
        self.listed, self.slow, self.given_up = Tally("footers read"), None, False

    def waiting_for(self):
        return self.slow

    def give_up(self):
        self.given_up = True


def test_an_activity_tells_how_far_it_is_and_which_server_keeps_it_waiting():
    activity, remote, tokenised = Activity(), Remote(), Tally("row groups tokenised", of=0)
    assert activity.waiting_for() is None
    activity.watch(remote)
    assert activity.waiting_for() == "hub: files are being listed"
    remote.listed.of, remote.listed.done = 1400, 1399
    assert activity.waiting_for() == "hub: 1,399 of 1,400 footers read"
    assert activity.server() is None
    remote.slow = "a.parquet, footer: try 2"
    assert activity.waiting_for() == "hub: 1,399 of 1,400 footers read; a.parquet, footer: try 2"
    assert activity.server() == "a.parquet, footer: try 2"
    remote.listed.done += 1
    activity.count("hub", tokenised)
    assert activity.waiting_for() == "a.parquet, footer: try 2"
    tokenised.expect(16)
    tokenised.done = 5
    remote.slow = None
    assert activity.waiting_for() == "hub: 5 of 16 row groups tokenised"
    assert activity.arrived() == 1405
    activity.give_up()
    assert remote.given_up
