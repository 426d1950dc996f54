"""What a person sees of the records of a running run: unhealthy steps, several ranks, and rows that are damaged."""

import pytest

from nsa import run_folder
from nsa.inspect.health import unhealthy
from nsa.inspect.reading import read_run
from nsa.record.sinks import TableSink
from tests.inspect.test_watch import live_run, text_of
from tests.record.runs import (
    BEGAN,
    GATES,
    LAYER_SELECTION,
    SELECTION,
    event,
    training_row,
)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"loss": "nan"}, "the loss of step 40 is nan"),
        ({"data_wait_s": 0.22}, "40% of a step is spent waiting for data"),
        ({"skipped": 1}, "40 of the last 40 steps were skipped"),
    ],
)
def test_unhealthy_steps_are_reported(tmp_path, row, words):
    now = live_run(tmp_path / "run", **row)
    assert any(words in line for line in unhealthy(read_run(tmp_path / "run", now)))


def test_tables_that_have_no_row_yet_are_not_reported(tmp_path):
    """Until the first step, whose compilation may take minutes, and in tables of layers that a run does not have."""
    opened = [TableSink(tmp_path, 0, table) for table in run_folder.TABLES]
    assert not {sink.name for sink in opened} & read_run(tmp_path).problems.keys()


def test_a_rising_loss_is_reported_and_a_noisy_one_is_not(tmp_path):
    now = live_run(tmp_path / "run", 400)
    assert unhealthy(read_run(tmp_path / "run", now)) == []
    with (tmp_path / "run" / "training.csv").open("a") as file:
        file.writelines(training_row(step, loss=12.0 + step / 100) for step in range(401, 501))
    assert "the loss rises" in unhealthy(read_run(tmp_path / "run", now))[0]


def test_tables_of_other_ranks_count_only_where_the_run_writes_them(tmp_path):
    """Those of an earlier run, which had telemetry.per_rank, stay in the folder."""
    now = live_run(tmp_path / "run")
    row = "5000,blocks.0.attention,10,0.1,0.0,1.0,0.75,0.002,0.9,0.098\n"
    header = (tmp_path / "run" / "gate_stats.csv").read_text().splitlines()[0]
    (tmp_path / "run" / "gate_stats_rank1.csv").write_text(f"{header}\n{row}")
    for is_written, newest in (("true", 5000), ("false", 40)):
        (tmp_path / "run" / "config.yaml").write_text(f"telemetry: {{per_rank: {is_written}}}\n")
        assert read_run(tmp_path / "run", now).gate_samples.last_step == newest


def test_fallbacks_are_counted_since_the_newest_start(tmp_path):
    now = live_run(tmp_path / "run")
    (tmp_path / "run" / "fallback_counters.csv").write_text("step,branch,reason,count\n30,sel,no triton,12\n")
    assert read_run(tmp_path / "run", now).fallbacks == {("sel", "no triton"): 12}
    with (tmp_path / "run" / "heartbeat_rank0.jsonl").open("a") as file:
        file.write(event("boot", 0, at=now) + event("start", 40, at=now, world_size=8, steps=80))
        file.write(event("step", 41, at=now + 1, loss=2.0, mem_gib=31.5, data_wait_s=0.004, toks_per_s=120000.0))
    assert read_run(tmp_path / "run", now + 1).fallbacks == {}


def test_collapsed_gates_an_idle_branch_and_fallbacks_on_a_gpu_are_reported(tmp_path):
    now = live_run(tmp_path / "run")
    with (tmp_path / "run" / "gate_stats.csv").open("a") as file:
        file.write(
            "50,blocks.0.attention,10,0.1,0.0,1.0,0.75,0.002,0.9,0.098\n50,blocks.1.attention,10,1,1,.4,0,.3,.3,.4\n"
        )
    (tmp_path / "run" / "fallback_counters.csv").write_text('step,branch,reason,count\n50,sel,"too wide, by far",12\n')
    found = "\n".join(unhealthy(read_run(tmp_path / "run", now)))
    assert (
        "gates are collapsed in 1 of 2 layers: in blocks.0.attention one branch has all the weight in 75% of rows"
        in found
    )
    assert "branch cmp is hardly used in 1 of 2 layers: its share in blocks.0.attention is 0.20%" in found
    assert "slow kernels on a GPU: sel fell back 12 times, too wide, by far" in found


def test_statistics_of_several_ranks_are_merged(tmp_path):
    now = live_run(tmp_path / "run")
    (tmp_path / "run" / "gate_stats.csv").write_text(GATES + "\n1,a,100,1.0,0.5,0.8,0.1,0.2,0.3,0.5\n")
    (tmp_path / "run" / "gate_stats_rank1.csv").write_text(GATES + "\n1,a,300,0.6,0.2,0.9,0.5,0.6,0.3,0.1\n")
    zeros = ",".join(["0.0"] * 10)
    (tmp_path / "run" / "k_stats.csv").write_text(SELECTION + f"\n1,100,4.0,5,0.5,0.5,0.5,1.0,0.0,{zeros}\n")
    (tmp_path / "run" / "k_stats_rank1.csv").write_text(SELECTION + f"\n1,100,12.0,16,0.5,0.1,0.9,0.0,1.0,{zeros}\n")
    for rank, rows in (("", "1,a,100,4.0,5,0.5,0.5,0.5,1.0,0.0"), ("_rank1", "1,a,300,12.0,16,0.5,0.1,0.9,0.0,1.0")):
        (tmp_path / "run" / f"k_stats_layers{rank}.csv").write_text(LAYER_SELECTION + f"\n{rows},{zeros}\n")
    (tmp_path / "run" / "heartbeat_rank1.jsonl").write_text(event("step", 40, 1, mem_gib=64.0, data_wait_s=0.1))
    view = read_run(tmp_path / "run", now)
    (gates,) = view.gates.values()
    assert gates.mean_entropy == pytest.approx(0.7)
    assert (gates.rows, gates.min_entropy, gates.largest_share) == (400, 0.2, 0.9)
    assert gates.shares == pytest.approx((0.5, 0.3, 0.2))
    assert (view.selection.mean_distinct, view.selection.max_distinct) == (8.0, 16)
    assert view.selection.share_forced == pytest.approx((4 * 0.5 + 12 * 0.1) / 16)
    assert view.selection.distances[1] == pytest.approx(0.75)
    layer = view.layer_selection["a"]
    assert (layer.rows, layer.mean_distinct) == (400, 10.0)
    assert layer.agreement == pytest.approx((100 * 4 * 0.5 + 300 * 12 * 0.9) / 4000)
    assert view.mem_gib == 64.0


def test_equal_reports_of_all_ranks_are_one_line_and_a_silent_rank_is_named(tmp_path):
    now = live_run(tmp_path / "run", 1000)
    what = {"seconds": 30, "message": "waited 30.0 s for the next batch"}
    for rank in (0, 1):
        with (tmp_path / "run" / f"heartbeat_rank{rank}.jsonl").open("a") as file:
            file.write(event("data_stall", 100, rank, at=BEGAN + 60, **what))
    with (tmp_path / "run" / "heartbeat_rank0.jsonl").open("a") as file:
        file.write(event("step", 1000))
    view = read_run(tmp_path / "run", now)
    (stall,) = [h for h in view.timeline if h.kind == "data stall"]
    assert stall.ranks == (0, 1)
    assert any(line.startswith("rank 1 has been silent for ") and "step 100" in line for line in unhealthy(view))


def test_a_rank_with_a_slow_clock_that_takes_every_step_is_not_called_silent(tmp_path):
    now = live_run(tmp_path / "run")
    steps = "".join(event("step", step, 1, at=BEGAN - 300 + step * 0.55) for step in range(1, 41))
    (tmp_path / "run" / "heartbeat_rank1.jsonl").write_text(steps)
    assert unhealthy(read_run(tmp_path / "run", now)) == []


def test_ranks_that_wait_for_the_data_of_another_one_are_not_called_silent(tmp_path):
    now = live_run(tmp_path / "run") + 120
    stall = event("data_stall", 40, 1, at=now, seconds=120, message="waited 120.0 s for the next batch")
    (tmp_path / "run" / "heartbeat_rank1.jsonl").write_text(event("step", 40, 1) + stall)
    view = read_run(tmp_path / "run", now)
    assert (view.status.kind, view.timeline[0].kind, unhealthy(view)) == ("running", "data stall", [])


def test_a_half_written_last_line_waits_for_its_rest(tmp_path):
    now = live_run(tmp_path / "run")
    row = training_row(41, loss=1.25)
    with (tmp_path / "run" / "training.csv").open("a") as file:
        file.write(row[:20])
        file.flush()
        view = read_run(tmp_path / "run", now)
        assert (view.step, view.problems) == (40, {})
        file.write(row[20:])
    view = read_run(tmp_path / "run", now)
    assert (view.step, view.latest("loss")) == (41, 1.25)


def test_one_wild_row_costs_only_itself(tmp_path):
    now = live_run(tmp_path / "run")
    with (tmp_path / "run" / "training.csv").open("a") as file:
        file.write(training_row(10**12) + training_row(41) + training_row(3) + training_row(42))
    view = read_run(tmp_path / "run", now)
    assert view.training.column("step").tolist() == list(range(1, 43))
    assert view.problems == {"training.csv": "2 damaged rows left out"}


@pytest.mark.parametrize("step", [40, 10000])
@pytest.mark.parametrize("rows", ["", "inf", "-inf", "-1"])
def test_a_sample_without_a_sound_count_of_rows_costs_only_itself(tmp_path, rows, step):
    now = live_run(tmp_path / "run")
    sound = read_run(tmp_path / "run", now)
    assert list(sound.gates) == ["blocks.0.attention", "blocks.1.attention", "all"]
    zeros = ",".join("0" * len(run_folder.DISTANCE_COLUMNS))
    for name, sample in (
        ("gate_stats.csv", f"{step},all,{rows},1,1,1,0,0.3,0.3,0.4"),
        ("k_stats.csv", f"{step},{rows},4.0,5,0.5,0.5,0.5,{zeros}"),
        ("k_stats_layers.csv", f"{step},blocks.0.attention,9,4.0,{rows},0.5,0.5,0.5,{zeros}"),
        ("fallback_counters.csv", f"{step},sel,too wide,{rows}"),
    ):
        with (tmp_path / "run" / name).open("a") as file:
            file.write(sample + "\n")
    view = read_run(tmp_path / "run", now)
    assert (view.gates, view.selection, view.layer_selection) == (sound.gates, sound.selection, sound.layer_selection)
    assert view.fallbacks == sound.fallbacks
    assert "gates at step 40" in text_of(view)
    assert set(view.problems.values()) - set(sound.problems.values()) == {"1 damaged rows left out"}
    assert len(view.problems) == len(sound.problems) + 4


def test_a_sample_of_no_rows_weighs_nothing(tmp_path):
    now = live_run(tmp_path / "run")
    before = read_run(tmp_path / "run", now).gates["all"]
    with (tmp_path / "run" / "gate_stats.csv").open("a") as file:
        file.write("40,all,0,1,1,1,0,0.3,0.3,0.4\n")
    after = read_run(tmp_path / "run", now).gates["all"]
    assert after.rows == before.rows
    assert after.shares == pytest.approx(before.shares)
    assert after.mean_entropy == pytest.approx(before.mean_entropy)
