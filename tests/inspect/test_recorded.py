"""A folder that an earlier version wrote is still read: `recorded/` is a run of 6 steps by version 0.1.0, before the
contract of the run folder became one module."""

import csv
import json
import random
import shutil
from pathlib import Path

import pytest

from nsa import run_folder
from nsa.inspect.health import unhealthy
from nsa.inspect.reading import read_run
from nsa.inspect.run_report import render
from nsa.inspect.view import frame
from nsa.record.sinks import TableSink
from tests.record.runs import EVENT_FIELDS

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture
def recorded(tmp_path):
    return Path(shutil.copytree(RECORDED, tmp_path / "run"))


def rows_of(name):
    with (RECORDED / name).open() as file:
        return list(csv.DictReader(file))


def test_watch_report_and_health_read_it():
    view = read_run(RECORDED)
    assert (view.status.kind, view.step, view.steps, view.problems, unhealthy(view)) == ("finished", 6, 6, {}, [])
    assert view.training.column("loss").tolist() == [float(row["loss"]) for row in rows_of("training.csv")]
    last = [row for row in rows_of("gate_stats.csv") if row["step"] == "6"]
    assert {layer: gates.share_win for layer, gates in view.gates.items()} == {
        row["layer"]: float(row["share_win"]) for row in last
    }
    assert view.selection.agreement == float(rows_of("k_stats.csv")[-1]["agreement"])
    assert list(view.layer_selection) == ["blocks.0.attention", "blocks.1.attention"]
    assert sum(view.fallbacks.values()) == sum(
        int(row["count"]) for row in rows_of("fallback_counters.csv") if row["step"] == "6"
    )
    assert [(entry.kind, entry.message) for entry in view.timeline] == [
        ("end", "all steps are done"),
        ("start", "from the beginning on node0"),
    ]
    text = frame(view).plain
    assert "step 6 of 6 (100%)" in text
    assert "agreement 96.2%" in text
    page = render(view)
    assert page.count("<svg") == 17, "the loss twice, for wide and narrow screens, and 15 others"
    assert "Nothing to show" not in page
    assert "Nothing unhealthy was found." in page


@pytest.mark.parametrize("table", run_folder.TABLES, ids=lambda table: table.stem)
def test_its_tables_are_continued_when_it_resumes(recorded, table):
    header, *rows = (recorded / table.file).read_text().splitlines()
    added = [name for name in table.columns if name not in header.split(",")]
    TableSink(recorded, 0, table, done_steps=4).close()
    kept = [row + "," * len(added) for row in rows if int(row.split(",")[0]) <= 4]
    assert (recorded / table.file).read_text().splitlines() == [",".join(table.columns), *kept]
    assert 0 < len(kept) < len(rows)
    assert (recorded / table.file).read_text().endswith("\n")
    assert [path.name for path in recorded.iterdir() if path.name not in {p.name for p in RECORDED.iterdir()}] == []


def test_its_events_match_the_contract():
    events = [run_folder.parse_event(line) for line in (RECORDED / "heartbeat_rank0.jsonl").read_text().splitlines()]
    later = ("clock", "boot_id", "start_ticks", "index_kl", "mass")  # it was recorded without them
    for event in events:
        fields = (*run_folder.COMMON_FIELDS, *EVENT_FIELDS[event["event"]])
        assert tuple(event) == tuple(name for name in fields if name not in later), event["event"]
        assert json.loads(run_folder.format_event(event)) == event
    assert {event["event"] for event in events} >= {"boot", "first_batch", "start", *run_folder.ROUTINE_EVENTS, "end"}


def test_a_hang_that_it_reported_is_read_without_who_reported_it(recorded):
    at = read_run(recorded).now
    event = {"v": 1, "time": at, "rank": 0, "step": 7, "event": "hang", "phase": "data", "silent_s": 61.2}
    with (recorded / "heartbeat_rank0.jsonl").open("a") as file:
        file.write(json.dumps({**event, "limit_s": 60.0, "file": "stackdump_x_rank0.txt", "ranks": []}) + "\n")
    (recorded / "metrics.json").write_text('{"status": "running", "steps": 0}')
    view = read_run(recorded, at + 1)
    told = "no progress for 61 s in step 7 (phase data); stacks in stackdump_x_rank0.txt"
    assert (view.status.kind, view.status.exit_code, view.status.reason) == ("failed", 6, told)
    assert (view.timeline[0].kind, view.timeline[0].message) == ("hang", told)
    assert unhealthy(view)[0] == f"failed with exit code 6: {told}"


def damage(folder: Path, chance: random.Random) -> None:
    """Overwrites bytes, truncates, appends garbage, shuffles lines, or removes a file."""
    path = folder / chance.choice(sorted(p.name for p in RECORDED.iterdir()))
    content = bytearray(path.read_bytes() if path.exists() else b"")
    lines = bytes(content).splitlines(keepends=True)
    kind = chance.choice(["bytes", "cut", "garbage", "shuffle", "remove"])
    if kind == "remove":
        path.unlink(missing_ok=True)
        return
    if kind == "bytes" and content:
        for _ in range(20):
            content[chance.randrange(len(content))] = chance.choice(b'0123456789,.-"e\n{}[]:\x00\xff')
    elif kind == "cut":
        del content[chance.randrange(len(content) + 1) :]
    elif kind == "garbage":
        content += bytes(chance.choices(b'0123456789,.-e"\nnaif{}', k=60)) + b"\n"
    elif kind == "shuffle":
        chance.shuffle(lines)
        content = bytearray(b"".join(lines))
    path.write_bytes(content)


@pytest.mark.parametrize("seed", range(12))
def test_random_damage_to_its_files_never_breaks_a_view(recorded, seed):
    chance = random.Random(seed)
    for _ in range(3):
        damage(recorded, chance)
        view = read_run(recorded)
        assert "step" in frame(view, chance.randint(20, 160), chance.randint(4, 60)).plain
    assert render(view).endswith("</html>\n")
