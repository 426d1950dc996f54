"""The contract of a run folder: names by rank, events and rows that read back as they were written, and statistics
that merge to what one rank would have seen. The documentation names every file, event and column of it."""

import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest

from nsa import run_folder
from nsa.files import remove_unfinished
from nsa.inspect.run_files import merged
from nsa.run_folder import GateStats, RankFiles, SelectionStats
from tests.record.runs import EVENT_FIELDS

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "telemetry.md").read_text()


def test_files_have_a_name_per_rank_and_are_found_by_it(tmp_path):
    for name in (
        *("heartbeat_rank0.jsonl", "heartbeat_rank11.jsonl", "heartbeat_rankx.jsonl", "heartbeat_rank0.jsonl.old"),
        *("k_stats.csv", "k_stats_rank2.csv", "k_stats_layers.csv", "trace_rank0.older.jsonl", "trace_rank0.jsonl"),
        *("stackdump_20261115_rank1.txt", "stackdump_20261116_rank1.txt", "stackdump_20261115_rank0.txt"),
    ):
        (tmp_path / name).touch()

    def found(files: RankFiles) -> dict[int, str]:
        return {rank: path.name for rank, path in files.find(tmp_path).items()}

    assert found(run_folder.HEARTBEAT) == {0: "heartbeat_rank0.jsonl", 11: "heartbeat_rank11.jsonl"}
    assert found(run_folder.SELECTION.files) == {0: "k_stats.csv", 2: "k_stats_rank2.csv"}
    assert found(run_folder.TRACE) == {0: "trace_rank0.jsonl"}
    assert found(run_folder.stack_dumps()) == {0: "stackdump_20261115_rank0.txt", 1: "stackdump_20261116_rank1.txt"}
    assert run_folder.memory_files("boot", ".txt").name(0) == "mem_boot.txt"
    assert run_folder.memory_files("step1", ".json").path(tmp_path, 3) == tmp_path / "mem_step1_rank3.json"


def test_half_written_tables_and_pages_of_a_killed_process_are_removed(tmp_path):
    for name in ("training.csv", "report.html", "metrics.json"):
        (tmp_path / f".{name}.{'0a' * 8}").touch()
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_event_reads_back_as_it_was_written():
    ranks = [{"rank": 1, "state": "gone"}]
    event = run_folder.make_event("hang", 3, 7, phase="step", silent_s=math.inf, limit_s=6.0, file=None, ranks=ranks)
    assert tuple(event) == (*run_folder.COMMON_FIELDS, *EVENT_FIELDS["hang"])
    line = run_folder.format_event(event)
    assert run_folder.parse_event(line) == {**event, "silent_s": "inf"}
    assert line.endswith("}\n")


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "7", "{}", '{"time": "nan", "step": 1, "event": "x"}', "\x00", "[" * 9999]
)
def test_a_damaged_line_is_not_an_event(line):
    with pytest.raises(ValueError):
        run_folder.parse_event(line)
    sound = run_folder.format_event(run_folder.make_event("end", 0, 1))
    assert [event["event"] for event in run_folder.parse_events([line, sound, line])] == ["end"]


def test_rows_read_back_as_they_were_written(tmp_path):
    counts = [("sel", 'too "wide", by far\nindeed', 12), ("win", "plain", 3)]
    event = run_folder.make_event("fallbacks", 0, 50, counts=counts)
    (tmp_path / "fallback_counters.csv").write_text(run_folder.FALLBACKS.header + run_folder.FALLBACKS.format(event))
    assert run_folder.read_rows(tmp_path, run_folder.FALLBACKS) == [
        {"step": "50", "branch": "sel", "reason": 'too "wide", by far indeed', "count": "12"},
        {"step": "50", "branch": "win", "reason": "plain", "count": "3"},
    ]
    assert run_folder.format_row([1, None, 0.1, math.nan, "a,b"]) == '1,,0.1,nan,"a,b"\n'


def test_a_sample_fills_its_tables_layer_by_layer_and_over_all():
    stats = SelectionStats(4, 2.5, 4, 0.5, 0.25, 0.75, tuple(n / 66 for n in range(12)), 0.875)
    layers = [{"layer": name, **asdict(stats)} for name in ("a", "b")]
    event = run_folder.make_event("selection", 0, 6, layers=layers, **asdict(stats))
    (row,) = run_folder.SELECTION.format(event).splitlines()
    assert row.split(",")[:3] == ["6", "4", "2.5"]
    assert [line.split(",")[1] for line in run_folder.LAYER_SELECTION.format(event).splitlines()] == ["a", "b"]
    cells = dict(zip(run_folder.SELECTION.columns, map(float, row.split(",")), strict=True))
    assert SelectionStats.of(cells) == stats
    assert SelectionStats.of({**cells, "mass": math.nan}).mass is None  # an empty cell
    gates = GateStats(10, 1.0, 0.5, 0.9, 0.1, 0.2, 0.3, 0.5)
    event = run_folder.make_event("gates", 0, 6, layers=[{"layer": "a", **asdict(gates)}], **asdict(gates))
    lines = [line.split(",") for line in run_folder.GATES.format(event).splitlines()]
    assert [line[1] for line in lines] == ["a", "all"]
    assert GateStats.of(dict(zip(run_folder.GATES.columns[2:], map(float, lines[0][2:]), strict=True))) == gates
    assert "layers" not in json.loads(run_folder.format_event(event))


def test_merging_weights_parts_by_their_rows():
    gates = merged([GateStats(1, 1.0, 0.5, 0.4, 0.0, 0.2, 0.3, 0.5), GateStats(3, 0.6, 0.2, 0.9, 1.0, 0.6, 0.3, 0.1)])
    assert asdict(gates) == pytest.approx(asdict(GateStats(4, 0.7, 0.2, 0.9, 0.75, 0.5, 0.3, 0.2)))
    shares = ((1, 1.0, None), (4, 0.0, 0.5), (4, 0.0, 0.9))
    few, many, more = (SelectionStats(10, n, n, 0.5, 0.5, share, (share,) * 12, mass) for n, share, mass in shares)
    both = merged([few, many])
    assert (both.rows, both.mean_distinct, both.max_distinct) == (20, 2.5, 4)
    assert (both.agreement, both.distances[0]) == (pytest.approx(0.2), pytest.approx(0.2))
    assert merged([few, few]).mass is None
    assert both.mass == 0.5, "of the part that measured it"
    assert merged([few, many, more]).mass == pytest.approx(0.7)


def test_the_documentation_names_every_file_event_and_column():
    files = [run_folder.CONFIG_FILE, run_folder.ENVIRONMENT_FILE, run_folder.METRICS_FILE, run_folder.TRACKER_FILE]
    files += [run_folder.OPTIMIZER_STATE_FILE, run_folder.WEIGHTS_FILE, run_folder.REPORT_FILE, run_folder.LOCK_FILE]
    files += [run_folder.DTYPES_FILE]
    files += [f"{name}/" for name in (run_folder.CHECKPOINTS_FOLDER, run_folder.TENSORBOARD_FOLDER)] + [
        run_folder.NONFINITE_FOLDER
    ]
    per_rank = (
        run_folder.HEARTBEAT,
        run_folder.TRACE,
        run_folder.OUT_OF_MEMORY,
        run_folder.NCCL_TRACE,
        run_folder.PROFILE_TRACE,
    )
    files += [f"{each.stem}_rank{{r}}{each.suffix}" for each in per_rank] + ["run_rank{r}.log", "mem_boot.*"]
    files += ["stackdump_{time}_rank{r}.txt", *(table.file for table in run_folder.TABLES)]
    assert [name for name in files if name not in DOCS] == []
    table = DOCS[DOCS.index("## Events") : DOCS.index("Kinds of incident")]
    assert set(EVENT_FIELDS) == set(get_args(run_folder.EventKind))
    for kind, own in EVENT_FIELDS.items():
        line = next((line for line in table.splitlines() if f"`{kind}`" in line), "")
        assert line, kind
        assert kind in run_folder.ROUTINE_EVENTS or [field for field in own if f"`{field}`" not in line] == [], kind
    columns = {column for table in run_folder.TABLES for column in table.columns if not column.startswith("distance_")}
    assert [column for column in sorted(columns) if f"`{column}`" not in DOCS] == []


def test_the_contract_is_read_without_torch_or_numpy():
    code = "import sys, nsa.run_folder; sys.exit(bool({'torch', 'numpy', 'yaml'} & set(sys.modules)))"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
