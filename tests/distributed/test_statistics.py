"""Statistics of two ranks, merged by whoever reads them, are those of one process that did it all."""

import csv

import pytest

from tests.distributed.launching import run_ranks, write_config

TRAIN = {"steps": 3, "batch_size": 4, "seq_len": 64, "eval_every": 0, "lr": 2e-3}
TELEMETRY = {"tensorboard": False, "every": 3, "per_rank": True}


def run(folder, strategy, size):
    config = write_config(
        folder,
        train={**TRAIN, "out_dir": str(folder / "run")},
        telemetry=TELEMETRY,
        parallel={"strategy": strategy, "timeout_s": 60.0},
        checkpoint={"every": 0},
    )
    for ended in run_ranks(size, "train", config):
        assert ended.code == 0, ended.output
    sizes = (folder / "run" / "opt_state_mb.txt").read_text().splitlines()
    assert [line.partition(":")[0] for line in sizes] == [f"rank {rank}" for rank in range(size)]
    return [merged(folder / "run", f"{name}{{}}.csv", size) for name in ("gate_stats", "k_stats")]


def merged(run_folder, pattern, size):
    """Rows of all ranks by (step, layer), means weighted by rows."""
    found = {}
    for rank in range(size):
        with (run_folder / pattern.format(f"_rank{rank}" if rank else "")).open() as file:
            for row in csv.DictReader(file):
                found.setdefault((row["step"], row.get("layer", "all")), []).append(row)
    return {
        key: {
            name: sum(float(row[name]) * int(row["rows"]) for row in rows) / sum(int(row["rows"]) for row in rows)
            for name in rows[0]
            if name.startswith(("mean_", "share_", "collapsed", "distance_"))
        }
        | {"rows": sum(int(row["rows"]) for row in rows)}
        for key, rows in found.items()
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_two_ranks_have_the_results_of_one_process(tmp_path, strategy):
    gates, selection = run(tmp_path / "single", "single", 1)
    assert {layer for _, layer in gates} == {"blocks.0.attention", "blocks.1.attention", "all"}
    assert gates["3", "all"]["rows"] == 2 * 4 * 64 * 4
    other_gates, other_selection = run(tmp_path / strategy, strategy, 2)
    assert set(other_gates) == set(gates)
    for key, stats in gates.items():
        assert other_gates[key] == pytest.approx(stats, rel=1e-4)
    for key, stats in selection.items():
        assert other_selection[key] == pytest.approx(stats, rel=1e-3)
