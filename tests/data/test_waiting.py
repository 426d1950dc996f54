"""Waits for data: reported with what is known, over when the result is there or the process is asked to stop."""

import threading
from concurrent.futures import Future

import pytest

from nsa.data import waiting
from nsa.data.threads import Progress
from nsa.data.waiting import Activity, Waiter, WaitStopped
from nsa.errors import DataUnavailableError
from tests.data.clock import Clock


class Wait:
    """A waiter on a clock of its own, and what it reports."""

    def __init__(self, stall_s=10.0, stopped=lambda: False):
        self.clock, self.activity, self.reports = Clock(), Activity(), []
        self.waiter = Waiter(
            self.activity,
            stall_s,
            lambda seconds, message: self.reports.append((round(seconds, 3), message)),
            stopped,
            self.clock,
            self.clock.pause,
        )

    def future(self, done_at=None, result=7):
        future = Future()
        if done_at is not None:
            self.clock.at(done_at, lambda: future.set_result(result))
        return future


def test_a_long_wait_is_reported_until_its_result_is_there():
    wait = Wait()
    wait.activity.add("text", Progress("parts tokenised", 3, 9))
    assert wait.waiter.wait(wait.future(done_at=35), "the source to open") == 7
    message = "data: waited {} s for the source to open; text: 3 of 9 parts tokenised"
    assert wait.reports == [(seconds, message.format(seconds)) for seconds in (10.0, 20.0, 30.0)]
    assert wait.clock.now == pytest.approx(35)


def test_a_short_wait_is_not_reported():
    wait = Wait()
    assert [wait.waiter.run(lambda n=n: n * n, "a square", 30, "data.timeout_s") for n in range(5)] == [0, 1, 4, 9, 16]
    assert not wait.reports


@pytest.mark.parametrize("error", [TimeoutError("slow disk"), DataUnavailableError("gone")])
def test_an_error_is_raised_as_it_was(error):
    def fail():
        raise error

    with pytest.raises(type(error), match=str(error)):
        Wait().waiter.run(fail, "an error", 30, "data.timeout_s")


def test_nothing_for_too_long_ends_the_wait():
    wait = Wait()
    expected = r"waited 30\.\d s for a batch; nothing arrived for 30 s: .* more time with data\.timeout_s"
    with pytest.raises(DataUnavailableError, match=expected):
        wait.waiter.wait(wait.future(), "a batch", timeout_s=30, setting="data.timeout_s")
    assert wait.clock.now == pytest.approx(30)


def test_anything_that_arrives_prolongs_the_wait():
    wait, progress = Wait(), Progress("parts tokenised", 0, 9)
    wait.activity.add("text", progress)
    for arrival in (20, 45):
        wait.clock.at(arrival, lambda: setattr(progress, "done", progress.done + 1))
    with pytest.raises(DataUnavailableError, match="nothing arrived for 30 s"):
        wait.waiter.wait(wait.future(), "a batch", timeout_s=30, setting="data.timeout_s")
    assert wait.clock.now == pytest.approx(75)


def test_a_request_to_stop_ends_a_wait_but_not_one_that_takes_a_moment():
    wait = Wait(stopped=lambda: True)
    assert wait.waiter.wait(wait.future(done_at=waiting.GRACE_S - 0.2, result="there"), "a moment") == "there"
    wait = Wait(stopped=lambda: True)
    with pytest.raises(WaitStopped):
        wait.waiter.wait(wait.future(), "an hour")
    assert wait.clock.now == pytest.approx(waiting.GRACE_S)


def test_a_wait_that_the_step_depends_on_is_not_interrupted():
    wait = Wait(stopped=lambda: True)
    assert wait.waiter.wait(wait.future(done_at=60), "the rest of the step", interruptible=False) == 7


def test_the_thread_of_an_interrupted_wait_ends_with_its_work():
    wait, released = Wait(stopped=lambda: True), threading.Event()
    with pytest.raises(WaitStopped):
        wait.waiter.run(lambda: released.wait(30), "an hour", 30, "data.timeout_s")
    (thread,) = [thread for thread in threading.enumerate() if thread.name.startswith("data-wait")]
    released.set()
    thread.join(5)
    assert not thread.is_alive()


class Remote:
    name = "hub"

    def __init__(self):
        self.listed, self.slow = Progress("footers read"), None

    def answered(self):
        return 5

    def waiting_for(self):
        return self.slow


def test_an_activity_names_its_progress_and_the_server_that_does_not_answer():
    activity, remote, tokenised = Activity(), Remote(), Progress("row groups tokenised", total=0)
    assert activity.waiting_for() is None
    activity.watch(remote)
    assert activity.waiting_for() == "hub: files are being listed"
    remote.listed.total, remote.listed.done = 1400, 1399
    assert activity.waiting_for() == "hub: 1,399 of 1,400 footers read"
    assert activity.server() is None
    remote.slow = "a.parquet, footer: try 2"
    assert activity.waiting_for() == "hub: 1,399 of 1,400 footers read; a.parquet, footer: try 2"
    assert activity.server() == "a.parquet, footer: try 2"
    remote.listed.done += 1
    activity.add("hub", tokenised)
    assert activity.waiting_for() == "a.parquet, footer: try 2"
    tokenised.total, tokenised.done = 16, 5
    remote.slow = None
    assert activity.waiting_for() == "hub: 5 of 16 row groups tokenised"
    assert activity.arrived() == 1400 + 5 + remote.answered()


def test_a_server_that_does_not_answer_ends_a_wait_for_work_that_may_take_any_time():
    wait, remote = Wait(), Remote()
    wait.activity.watch(remote)
    future = wait.future(done_at=100)
    assert wait.waiter.wait(future, "tokens", timeout_s=30, setting="data.first_batch_s", server_only=True) == 7
    remote.slow, began = "a.parquet, footer: no answer", wait.clock.now
    with pytest.raises(DataUnavailableError, match=r"a\.parquet, footer: no answer; nothing arrived for 30 s: "):
        wait.waiter.wait(wait.future(), "tokens", timeout_s=30, setting="data.first_batch_s", server_only=True)
    assert wait.clock.now == pytest.approx(began + 30)
