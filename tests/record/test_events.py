"""The stream of events: what every sink gets, and what one that hangs or fails costs the others, which is nothing."""

import sys
import threading
import time
import types
from dataclasses import asdict

import pytest

from nsa.record import events
from nsa.record.events import EventStream, Sink
from nsa.record.sinks import Tracker
from nsa.run_folder import GateStats, TrainingRow, make_event
from tests.waiting import wait_until


class Kept(Sink):
    """Keeps the steps it is given."""

    is_awaited = True

    def __init__(self, name="kept"):
        self.name, self.steps, self.flushed, self.closed = name, [], 0, 0

    def write(self, event):
        self.steps.append(event["step"])

    def flush(self):
        self.flushed += 1

    def close(self):
        self.closed += 1


class Hanging(Kept):
    """Hangs in its first event until it is released."""

    is_awaited = False

    def __init__(self):
        super().__init__("wandb")
        self.released = threading.Event()

    def write(self, event):
        self.released.wait(30)
        super().write(event)


@pytest.fixture
def hanging():
    sink = Hanging()
    yield sink
    sink.released.set()


def test_a_sink_that_hangs_holds_up_no_other_and_no_checkpoint(hanging, monkeypatch):
    monkeypatch.setattr(events, "TIMEOUT_S", 0.3)
    kept, stream = Kept(), EventStream(0)
    stream.add(hanging)
    stream.add(kept)
    for step in range(100):
        stream.emit("step", step)
    began = time.monotonic()
    stream.flush(20.0)
    assert time.monotonic() - began < 5, "it is not waited for"
    assert (kept.steps, kept.flushed, stream.failures.count) == (list(range(100)), 1, 0)
    stream.close()
    assert kept.closed == 1
    assert stream.failures.count == 100, "what it has not written is lost, and counted"
    assert stream.failures.last == "wandb does not answer"


def test_a_file_that_hangs_is_waited_for_until_the_timeout(hanging):
    hanging.is_awaited = True
    stream = EventStream(0, [hanging])
    stream.emit("step", 1)
    began = time.monotonic()
    stream.flush(0.2)
    assert 0.2 <= time.monotonic() - began < 5
    assert (stream.failures.count, stream.failures.last) == (1, "wandb does not answer")


def test_the_queue_of_a_sink_that_hangs_is_bounded_and_dropped_events_are_counted(hanging, monkeypatch):
    monkeypatch.setattr(events, "MAX_QUEUED", 10)
    stream = EventStream(0, [hanging])
    stream.emit("step", 0)
    wait_until(lambda: not stream._writers[0].queued)  # it is in the first one
    for step in range(1, 31):
        stream.emit("step", step)
    assert stream.failures.count == 20
    hanging.released.set()
    stream.close()
    assert hanging.steps == list(range(11)), "none that was taken is lost, and in order"
    assert (stream.failures.count, hanging.closed) == (20, 1)


def test_a_sink_that_fails_three_times_in_a_row_is_removed_and_its_neighbours_stay(recorder_bugs):
    class Failing(Kept):
        def write(self, event):
            super().write(event)
            if event["step"] != 2:
                raise ValueError("no")

    failing, kept = Failing("failing"), Kept()
    stream = EventStream(0, [failing, kept])
    for step in range(1, 8):
        stream.emit("step", step)
    stream.close()
    assert failing.steps == [1, 2, 3, 4, 5], "one failure, then three in a row"
    assert failing.closed == 1
    assert kept.steps == [1, 2, 3, 4, 5, 6, 7]
    assert (stream.failures.count, stream.failures.last) == (4, "failing cannot be written: no")
    assert len(recorder_bugs) == 4
    recorder_bugs.clear()


def test_a_last_event_is_written_after_the_stream_was_closed():
    kept = Kept()
    stream = EventStream(0, [kept])
    stream.emit("end", 1)
    stream.close()
    stream.emit("hang", 2)
    stream.flush()
    assert kept.steps == [1, 2]


def test_closing_a_stream_ends_its_threads():
    before = threading.active_count()
    stream = EventStream(0, [Kept()])
    stream.add(Kept())
    stream.emit("end", 1)
    stream.close()
    wait_until(lambda: threading.active_count() == before)


def test_a_tracker_never_gets_an_earlier_step_which_it_would_drop(tmp_path, monkeypatch):
    logged = []
    package = types.ModuleType("wandb")
    package.init, package.finish = lambda **_: None, lambda: None
    package.log = lambda scalars, step: logged.append((step, sorted(scalars)[0]))
    monkeypatch.setitem(sys.modules, "wandb", package)
    stream = EventStream(0, [Tracker("wandb", tmp_path, {})])
    gates = GateStats(1, 1.0, 1.0, 0.4, 0.0, 0.3, 0.3, 0.4)
    for step in (50, 51):
        stream.emit("step", **asdict(TrainingRow(step, 1, 2.0, 0.1, 1.0, 1.0, 1.0, 0.0, 1.0)))
    stream.emit("gates", 50, layers=[], **asdict(gates))  # as from a GPU, a step late
    stream.close()
    assert logged == [(50, "train/grad_norm"), (51, "train/grad_norm"), (51, "gates/collapsed")]


@pytest.mark.parametrize(("name", "key"), [("wandb", "id"), ("trackio", "name")])
def test_a_tracker_resumes_its_run_by_the_id_in_the_folder(tmp_path, monkeypatch, name, key):
    starts = []
    package = types.ModuleType(name)
    package.init, package.log = lambda **options: starts.append(options), lambda *_, **__: None
    monkeypatch.setitem(sys.modules, name, package)

    def run_in(folder):
        folder.mkdir(exist_ok=True)
        row = TrainingRow(1, 1, 2.0, 0.1, 1.0, 1.0, 1.0, 0.0, 1.0)
        Tracker(name, folder, {}).write(make_event("step", 0, **asdict(row)))
        assert starts[-1]["name"].startswith(folder.name)
        assert starts[-1]["resume"] == "allow"
        return starts[-1][key]

    first = run_in(tmp_path / "run")
    assert run_in(tmp_path / "run") == first
    assert run_in(tmp_path / "other") != first
    (tmp_path / "run" / "tracker_id.txt").write_bytes(b"\xff damaged")
    assert run_in(tmp_path / "run") != first
