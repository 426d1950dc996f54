"""Exact resume (row 1 of reliability.md): kill -9 anywhere, the same command again, the same bits as never killed."""

import pytest

from tests.checkpoint.helpers import saved_steps
from tests.distributed.launching import rows_of, run_ranks
from tests.faults.kills import (
    END_POINTS,
    EVERY_RANK,
    POINTS,
    SAVE_POINTS,
    assert_equal_to_the_bit,
    assert_prefix_equal,
    make_runs,
)

# Point and how often it is passed before the kill. Every start resumes where the last one was killed.
CHAIN = [
    ("step.begin", 2),
    ("save.begin", 1),
    ("save.shard", 1),
    ("step.forward", 4),
    ("save.renamed", 1),
    ("validate", 1),
    ("save.prepare", 1),
    ("step.optimizer", 3),
    ("save.shard_written", 2),
    ("save.index", 1),
    ("save.own", 2),
    ("step.backward", 3),
    ("save.state", 1),
    ("save.manifest", 2),
    ("save.rename", 1),
    ("save.latest", 1),
    ("save.retention", 1),
    ("start.running", 1),
    ("end.weights", 1),
    ("end.metrics", 1),
]


def test_twenty_kills_of_one_process_change_no_bit(tmp_path, unbroken):
    runs, whole = make_runs(tmp_path, "single", steps=24), unbroken("single", steps=24)
    for point, hit in CHAIN:
        runs.kill("killed", f"{point}:kill:hit={hit}")
        assert_prefix_equal(tmp_path / "killed", whole)
    runs.finish("killed")
    assert_equal_to_the_bit(tmp_path / "killed", whole, 1)


def test_rows_are_on_the_disk_before_the_checkpoint_that_counts_them(tmp_path):
    """The first write of rows takes three seconds, in which the first checkpoint comes due; it must wait."""
    make_runs(tmp_path, "single").kill("killed", "rows.write:sleep:seconds=3,save.renamed:kill")
    assert saved_steps(tmp_path / "killed") == [2]
    assert [row["step"] for row in rows_of(tmp_path / "killed")][:2] == ["1", "2"]


@pytest.mark.parametrize(
    ("strategy", "kills"),
    [
        pytest.param(
            "ddp",
            ["step.backward:kill:hit=4:rank=1", "save.rename:kill:rank=0", "validate:kill:rank=1"],
            marks=pytest.mark.long,
        ),
        ("fsdp", ["save.shard_written:kill:hit=2:rank=1", "step.forward:kill:hit=2:rank=0", "validate:kill"]),
    ],
)
def test_kills_among_two_ranks_change_no_bit(tmp_path, unbroken, strategy, kills):
    runs, whole = make_runs(tmp_path, strategy, recompute="block"), unbroken(strategy, "block")
    for fault in kills:
        runs.kill("killed", fault)
        assert_prefix_equal(tmp_path / "killed", whole)
    runs.finish("killed")
    assert_equal_to_the_bit(tmp_path / "killed", whole, 2)


def test_a_rank_lost_in_the_last_save_is_not_a_failed_save(tmp_path):
    runs = make_runs(tmp_path, "ddp", steps=3)
    ended = runs.train("run", "save.own:kill:hit=2:rank=1")
    assert [e.code for e in ended] == [8, -9], ended[0].output
    runs.finish("run")


def test_a_prolonged_run_that_is_killed_while_it_starts_is_not_finished(tmp_path):
    runs = make_runs(tmp_path, "single", steps=4)
    runs.finish("run")
    arguments = ["train", runs.config, "train.steps=6", f"train.out_dir={tmp_path / 'run'}", "--accept-changes"]
    assert run_ranks(1, *arguments, faults="start.running:kill")[0].code == -9
    assert run_ranks(1, *arguments)[0].code == 0
    assert len(rows_of(tmp_path / "run")) == 6


@pytest.mark.long
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_one_kill_at_every_point_changes_no_bit(tmp_path, unbroken, strategy, recompute, point):
    runs, whole = make_runs(tmp_path, strategy, recompute=recompute), unbroken(strategy, recompute)
    rank = POINTS.index(point) % runs.size if point in EVERY_RANK else 0
    hit = 1 if point in END_POINTS else 2 if point in SAVE_POINTS or point == "validate" else 4
    runs.kill("killed", f"{point}:kill:hit={hit}:rank={rank}")
    runs.finish("killed")
    assert_equal_to_the_bit(tmp_path / "killed", whole, runs.size)
