"""The soak: thousands of tiny steps on two ranks, while every few seconds something goes wrong that a machine can do.

`make test-long` runs it for half an hour; `SOAK_S=120` in the environment makes that two minutes, with fewer steps.
"""

import os
import random
import resource
import signal
import statistics
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from tests.distributed.launching import metrics_of, numbers_of, start_ranks, wait_all
from tests.faults.kills import make_runs

DURATION_S = float(os.environ.get("SOAK_S", "1800"))
STEPS = max(300, round(20_000 * DURATION_S / 1800))
END_S = 240.0  # for what a rank does before it ends: a save, a hang that must be found
WANTED = {75, 8, 6, -9}  # preempted, rank lost, hang, killed
MIB = 2**20
KINDS = ("kill", "kill both", "terminate", "hang up", "close", "disk", "descriptors", "pause", "stop")


class Console:
    """A pseudo-terminal that is read until it is closed."""

    def __init__(self):
        self.ours, self.theirs = os.openpty()
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        os.set_blocking(self.ours, False)
        while not self._closing.wait(0.05):
            with suppress(OSError):
                while os.read(self.ours, 1 << 16):
                    pass
        os.close(self.ours)

    def close(self):
        self._closing.set()
        self._reader.join()  # at once, where it was closed before


class Job:
    """Two ranks, and what they use while they live."""

    def __init__(self, runs, name):
        self.folder, self.console = runs.folder / name, Console()
        before = last_step(self.folder)
        arguments = ("train", runs.config, f"train.out_dir={self.folder}")
        self.ranks = start_ranks(2, *arguments, console=self.console.theirs)
        os.close(self.console.theirs)
        self.samples = []
        deadline = time.monotonic() + END_S
        while self.lives and last_step(self.folder) == before:
            assert time.monotonic() < deadline, "no progress"
            time.sleep(0.05)

    @property
    def lives(self):
        return any(rank.poll() is None for rank in self.ranks)

    def watch(self, seconds):
        """Waits, and looks at the first rank now and then."""
        end = time.monotonic() + seconds
        while self.lives and time.monotonic() < end:
            sample = usage(self.ranks[0].pid)
            if sample is not None:
                self.samples.append((last_step(self.folder), folder_bytes(self.folder), *sample))
            time.sleep(min(0.5, max(0.0, end - time.monotonic())))

    def signal(self, number, *ranks):
        for rank in ranks:
            self.ranks[rank].send_signal(number)

    def limit(self, kind, value, seconds):
        """A resource that is used up for a while."""
        before = {}
        for rank in self.ranks:
            with suppress(ProcessLookupError):
                before[rank.pid] = resource.prlimit(rank.pid, kind)
                resource.prlimit(rank.pid, kind, (value, before[rank.pid][1]))
        self.watch(seconds)
        for pid, limits in before.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, kind, limits)

    def end(self):
        codes = [ended.code for ended in wait_all(self.ranks, END_S)]
        self.console.close()
        return codes


def usage(pid):
    """Resident bytes, descriptors and threads; None where the process is gone."""
    try:
        process = Path(f"/proc/{pid}")
        pages = int((process / "statm").read_text().split()[1])
        descriptors, threads = (len(list((process / kind).iterdir())) for kind in ("fd", "task"))
        return pages * os.sysconf("SC_PAGE_SIZE"), descriptors, threads
    except (OSError, IndexError):
        return None


def last_step(run):
    try:
        with (run / "training.csv").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
            lines = [line for line in file.read().split(b"\n")[:-1] if line[:1].isdigit()]
            return int(lines[-1].split(b",")[0]) if lines else 0
    except OSError:
        return 0


def folder_bytes(run):
    return sum(path.stat().st_size for path in run.iterdir() if path.is_file())


def disturb(job, draw, kind):
    """One fault; whether the job is expected to go on by itself."""
    rank = draw.randrange(2)
    if kind == "kill":
        job.signal(signal.SIGKILL, rank)
    elif kind == "kill both":
        job.signal(signal.SIGKILL, 0, 1)
    elif kind == "terminate":
        job.signal(draw.choice([signal.SIGTERM, signal.SIGUSR1]), rank)
    elif kind == "hang up":
        job.console.close()
        job.signal(signal.SIGHUP, 0, 1)
    elif kind == "close":
        job.console.close()
    elif kind == "disk":
        job.limit(resource.RLIMIT_FSIZE, 0, draw.uniform(1, 5))
    elif kind == "descriptors":
        job.limit(resource.RLIMIT_NOFILE, 3, draw.uniform(0.5, 2))
    elif kind == "pause":
        job.signal(signal.SIGSTOP, rank)
        job.watch(draw.uniform(0.5, 3))
        job.signal(signal.SIGCONT, rank)
    else:  # for good: the other rank ends, then the parent kills this one, as torchrun's agent does
        job.signal(signal.SIGSTOP, rank)
        job.ranks[1 - rank].wait(END_S)
        job.signal(signal.SIGKILL, rank)
    return kind in ("close", "disk", "descriptors", "pause")


def assert_flat(samples):
    """Memory, descriptors, threads and bytes a step: the second half of a run as the first, less its start."""
    first, second = samples[len(samples) // 5 : len(samples) // 2], samples[len(samples) // 2 :]
    assert len(first) > 5, "too short to see anything"
    for what, place, allowed in (("resident bytes", 2, 8 * MIB), ("descriptors", 3, 2), ("threads", 4, 1)):
        middle = [statistics.median(sample[place] for sample in part) for part in (first, second)]
        print(f"{what}: {middle[0]:.0f}, {middle[1]:.0f}", flush=True)
        assert middle[1] <= middle[0] + allowed, what
    a, b = [(part[-1][1] - part[0][1]) / (part[-1][0] - part[0][0]) for part in (first, second)]
    print(f"bytes a step: {a:.0f}, {b:.0f}", flush=True)
    assert b == pytest.approx(a, rel=0.1), "bytes a step"


@pytest.mark.long
@pytest.mark.timeout(4 * DURATION_S + 1200)
def test_a_run_that_is_disturbed_at_random_has_the_weights_of_one_that_is_not(tmp_path):
    more = {"telemetry": {"tensorboard": False, "watchdog_floor_s": 15.0}, "checkpoint": {"every": 25}}
    runs = make_runs(tmp_path, "ddp", steps=STEPS, eval_every=STEPS // 10, **more)
    whole = Job(runs, "whole")
    whole.watch(4 * DURATION_S + 600)
    assert whole.end() == [0, 0]
    assert_flat(whole.samples)

    draw, counts, until = random.Random(20), Counter(), time.monotonic() + DURATION_S
    codes, kinds = [], []
    while codes != [0, 0]:
        job, goes_on = Job(runs, "disturbed"), True
        while goes_on and job.lives:
            job.watch(draw.uniform(2, 10))
            if time.monotonic() > until or last_step(job.folder) > STEPS - 100:  # its results are written undisturbed
                job.watch(4 * DURATION_S + 600)
            elif job.lives:
                kinds = kinds or draw.sample(KINDS, len(KINDS))
                counts[kinds[-1]] += 1
                goes_on = disturb(job, draw, kinds.pop())
        codes = job.end()
        print(f"{last_step(job.folder)} steps, {codes}, {dict(counts)}", flush=True)
        assert codes == [0, 0] or set(codes) <= WANTED, codes
    run = tmp_path / "disturbed"
    assert (run / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert metrics_of(run)["status"] == "done"
    numbers = {row["step"]: row for row in numbers_of(tmp_path / "whole")}
    rows = numbers_of(run)
    assert [row for row in rows if row != numbers[row["step"]]] == []
    assert len({row["step"] for row in rows}) == len(rows)
