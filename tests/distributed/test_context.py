"""Context parallelism is the same run: sequences divided among 2 and 4 ranks over gloo against one process.

Layers are compared in float64 by `context_worker`, with the bytes that they send; whole runs here, within row 6 of
reliability.md.
"""

import csv
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.traffic import bytes_per_layer
from nsa.checkpoint.export import find_checkpoint, read_weights
from nsa.checks.memory_estimate import estimate
from nsa.config import parse_config
from nsa.config.schema import ParallelConfig
from nsa.data.loader import Batch
from nsa.data.sequences import IGNORED
from nsa.errors import ConfigError, LaunchError
from nsa.ops import NSASpec
from nsa.parallel.context import Context, chunks_of, data_ranks
from nsa.parallel.numerics import cpu_has_bf16
from nsa.parallel.world import start_world
from nsa.train.nonfinite import reproduce
from tests.distributed.launching import numbers_of, run_ranks, start_ranks, wait_all, write_config
from tests.distributed.test_same_numbers import (
    CHAT,
    DEEP,
    PATTERN,
    assert_same,
    column,
    recompute,
    strategy,
    train_all,
    train_beside,
    tree,
)

pytestmark = pytest.mark.timeout(900)

SHORT = {"train": {"steps": 4, "eval_every": 2}, "checkpoint": {"every": 0}, "telemetry": {"every": 1}}
MLP = {"nsa": {"phi": "mlp"}}
# 122 tokens, packed, in 4 or 8 chunks. With seeds 0 and 1, two blocks once have equal scores up to rounding within 20
# steps, and 4 ranks select the other one.
ODD = {"train": {"seq_len": 61, "batch_size": 2, "seed": 2}}
WHOLE_ROWS = {"data": {"isolate_documents": False}, "train": {"seq_len": 64, "batch_size": 2}}


def divided(ranks, kind="ddp"):
    return {"parallel": {"strategy": kind, "context": ranks}}


def matrix(*layers):
    """Each case of one process, in the ranks of a group."""
    return {
        "deep": tree(DEEP, *layers),
        "deep-mlp": tree(DEEP, MLP, *layers),
        "deep-pattern": tree(DEEP, PATTERN, {"model": {"n_layers": 8}}, *layers),
        "deep-odd": tree(DEEP, ODD, MLP, *layers),
        "deep-rows": tree(DEEP, WHOLE_ROWS, *layers),
    }


QUICK = {
    "odd": (tree(SHORT, ODD, MLP, PATTERN, CHAT), divided(2, "fsdp")),
    "rows": (tree(SHORT, WHOLE_ROWS), divided(2)),
    "rows-block": (tree(SHORT, WHOLE_ROWS), {**divided(2), **recompute("block")}),
}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One process and two ranks that share every sequence."""
    folder = tmp_path_factory.mktemp("context")
    one = [{"name": f"one-{name}", "config": QUICK[name][0]} for name in ("odd", "rows")]
    two = [{"name": name, "config": tree(config, how)} for name, (config, how) in QUICK.items()]
    train_beside(folder, {1: one, 2: two})
    return folder


def assert_same_run(many, one):
    assert column(many, "loss")[0] == pytest.approx(column(one, "loss")[0], rel=1e-6)
    assert_same(many, one, loss=1e-5, norm=1e-4)
    assert column(many, "val_loss") == pytest.approx(column(one, "val_loss"), rel=1e-5)
    assert column(many, "tokens") == column(one, "tokens")
    weights, wanted = (load_file(run / "model.safetensors") for run in (many, one))
    for name, tensor in wanted.items():  # by norm: rounding decides how AdamW moves an element without gradient
        assert (weights[name] - tensor).norm() <= 1e-4 * tensor.norm(), name


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_layers_over_ranks_equal_one_rank_and_send_the_bytes_of_the_formula(ranks):
    layers = () if ranks == 4 else ("mlp", "shared", "msa", "warmup", "keys", "dense")
    for ended in wait_all(start_ranks(ranks, *layers, module="tests.distributed.context_worker"), timeout_s=600):
        assert ended.code == 0, ended.output


@pytest.mark.long
def test_all_layers_over_two_ranks():
    for ended in wait_all(start_ranks(2, module="tests.distributed.context_worker"), timeout_s=600):
        assert ended.code == 0, ended.output


@pytest.mark.parametrize("name", ["odd", "rows"])
def test_two_ranks_that_share_sequences_train_as_one_process(quick, name):
    assert_same_run(quick / name, quick / f"one-{name}")


def test_recomputation_changes_no_bit(quick):
    assert column(quick / "rows-block", "loss") == column(quick / "rows", "loss")
    assert column(quick / "rows-block", "grad_norm") == column(quick / "rows", "grad_norm")


def test_statistics_cover_whole_sequences(quick):
    for name in ("gate_stats", "k_stats"):
        one, many = (table(quick / run / f"{name}.csv") for run in ("one-rows", "rows"))
        assert one
        assert many.keys() == one.keys()
        for key, wanted in one.items():
            # Blocks of neighbours are not compared across the borders of chunks, 3 of 63 pairs here.
            tolerances = {column: 0.05 if column == "agreement" else 1e-3 for column in wanted}
            for column_name, value in wanted.items():
                near = pytest.approx(value, rel=tolerances[column_name], abs=1e-6)
                assert many[key][column_name] == near, (key, column_name)


def test_the_mass_of_msa_blocks_is_sampled_from_whole_sequences(quick):
    one, many = (table(quick / run / "k_stats_layers.csv") for run in ("one-odd", "odd"))
    layers = ("blocks.1.attention", "blocks.2.attention")  # msa, nsa
    after_warm_up = {(step, layer) for step in "34" for layer in layers}
    assert one.keys() == many.keys() == after_warm_up | {("1", layers[1]), ("2", layers[1])}
    assert {key for key, row in many.items() if "mass" in row} == {("3", layers[0]), ("4", layers[0])}
    for step in "34":
        assert many[step, layers[0]]["mass"] == pytest.approx(one[step, layers[0]]["mass"], abs=0.03)


def table(path):
    with path.open() as file:
        rows = list(csv.DictReader(file))
    keys = ("step", "layer")
    return {
        tuple(row.get(key, "") for key in keys): {k: float(v) for k, v in row.items() if k not in keys and v}
        for row in rows
    }


@pytest.mark.long
@pytest.mark.parametrize("case", matrix())
def test_twenty_steps_stay_within_the_tolerances(tmp_path, case):
    train_all(tmp_path, 1, [{"name": "one", "config": matrix()[case]}])
    train_all(tmp_path, 2, [{"name": "two", "config": matrix(divided(2))[case]}])
    hows = {"four": divided(4), "ddp": divided(2), "fsdp": divided(2, "fsdp")}
    train_all(tmp_path, 4, [{"name": name, "config": matrix(how)[case]} for name, how in hows.items()])
    for name in ("two", *hows):
        assert_same_run(tmp_path / name, tmp_path / "one")


@pytest.mark.long
@pytest.mark.parametrize("granularity", ["selective", "branch"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_every_recomputation_changes_no_bit(tmp_path, granularity, kind):
    jobs = {"plain": tree(SHORT, divided(2, kind)), "again": tree(SHORT, divided(2, kind), recompute(granularity))}
    train_all(tmp_path, 2, [{"name": name, "config": config} for name, config in jobs.items()])
    assert column(tmp_path / "again", "loss") == column(tmp_path / "plain", "loss")
    assert column(tmp_path / "again", "grad_norm") == column(tmp_path / "plain", "grad_norm")


@pytest.mark.long
def test_a_teacher_is_divided_too(tmp_path):
    train_all(tmp_path, 1, [{"name": "teacher", "config": tree(SHORT)}])
    taught = tree(SHORT, ODD, {"train": {"teacher": str(tmp_path / "teacher"), "seed": 1}})
    train_all(tmp_path, 1, [{"name": "one", "config": taught}])
    train_all(tmp_path, 2, [{"name": "two", "config": tree(taught, divided(2))}])
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.long
def test_frozen_parameters_stay_as_they_are(tmp_path):
    frozen = tree(SHORT, ODD, {"train": {"freeze": ["*", "!*.attention.*"]}})
    train_all(tmp_path, 1, [{"name": "start", "config": tree(frozen, {"train": {"steps": 1}})}])
    train_all(tmp_path, 1, [{"name": "one", "config": frozen}])
    train_all(tmp_path, 2, [{"name": "two", "config": tree(frozen, divided(2, "fsdp"))}])
    assert_same_run(tmp_path / "two", tmp_path / "one")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("start", "two"))
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved
    assert all(".attention." in name for name in moved)


@pytest.mark.long
def test_bf16_differs_by_rounding_alone(tmp_path):
    config = tree(SHORT, WHOLE_ROWS, {"runtime": {"precision": "bf16"}})
    train_all(tmp_path, 1, [{"name": "one", "config": config}])
    train_all(tmp_path, 2, [{"name": "two", "config": tree(config, divided(2))}])
    assert_same(tmp_path / "two", tmp_path / "one", loss=5e-3, norm=5e-2)
    if cpu_has_bf16():
        exact = tree(SHORT, WHOLE_ROWS)
        train_all(tmp_path, 1, [{"name": "exact", "config": exact}])
        assert column(tmp_path / "exact", "loss") != column(tmp_path / "one", "loss")


@pytest.mark.long
def test_a_step_that_is_not_finite_can_be_run_again_in_one_process(tmp_path):
    config = write_config(tmp_path, train={"steps": 3}, parallel={"context": 2})
    ended = run_ranks(2, "train", config, f"train.out_dir={tmp_path / 'run'}", faults="step.loss:nan:hit=2:rank=1")
    assert [e.code for e in ended] == [5, 5]
    (dumped,) = (tmp_path / "run" / "nonfinite").iterdir()
    assert [e.code for e in run_ranks(2, "train", config, f"train.out_dir={tmp_path / 'unbroken'}")] == [0, 0]
    again = reproduce(dumped)  # the NaN was injected: without it, the step has the numbers of an unbroken run
    assert again.loss == pytest.approx(column(tmp_path / "unbroken", "loss")[1], rel=1e-5)
    assert again.grad_norm == pytest.approx(column(tmp_path / "unbroken", "grad_norm")[1], rel=1e-4)


def test_a_killed_run_resumes_to_the_bit(tmp_path):
    config = write_config(tmp_path, train={"steps": 4}, parallel={"context": 2})
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert [e.code for e in run_ranks(2, "train", config, f"train.out_dir={whole}")] == [0, 0]
    ended = run_ranks(2, "train", config, f"train.out_dir={killed}", faults="step.backward:kill:hit=3:rank=1")
    assert -9 in [e.code for e in ended]
    assert [e.code for e in run_ranks(2, "train", config, f"train.out_dir={killed}")] == [0, 0]
    assert numbers_of(killed) == numbers_of(whole)
    a, b = (load_file(run / "model.safetensors") for run in (whole, killed))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.long
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    """2 -> 1 -> 4 ranks a sequence: checkpoints do not depend on it, and the numbers are those of one process."""
    still = {"train": {"schedule": "constant", "batch_size": 2}, "checkpoint": {"every": 0}}
    train_all(tmp_path, 1, [{"name": "one", "config": tree(still, {"train": {"steps": 9}})}])
    for steps, ranks in ((3, 2), (6, 1), (9, 4)):
        how = divided(ranks, "fsdp") if ranks > 1 else strategy("single")
        config = tree(still, {"train": {"steps": steps}}, how)
        if steps > 3:
            before = read_weights(find_checkpoint(tmp_path / "moved"))
            shutil.copytree(tmp_path / "moved", tmp_path / f"same{ranks}")
            same = tree(still, {"train": {"steps": steps - 3}}, how)
            train_all(tmp_path, ranks, [{"name": f"same{ranks}", "config": same, "accept_changes": True}])
            after = load_file(tmp_path / f"same{ranks}" / "model.safetensors")
            assert all(torch.equal(after[name], before[name]) for name in before)
        train_all(tmp_path, ranks, [{"name": "moved", "config": config, "accept_changes": True}])
    assert_same_run(tmp_path / "moved", tmp_path / "one")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_batch_is_divided_without_loss(size):
    tokens = torch.arange(2 * 61).view(2, 61) + 1
    shares = [Batch(tokens, tokens, None).take(*Context(None, size, rank).rows(61)) for rank in range(size)]
    assert len({share.inputs.shape for share in shares}) == 1
    for row in range(2):
        found = torch.cat([share.targets[row] for share in shares])
        assert sorted(found[found != IGNORED].tolist()) == tokens[row].tolist()
    early, late = chunks_of(1, size)
    assert (early, late) == (1, 2 * size - 2)
    packed = Batch(tokens[:1], tokens[:1], torch.tensor([0, 7, 61], dtype=torch.int32)).take(
        *Context(None, size, 0).rows(61)
    )
    length = -(-61 // (2 * size)) * 2 * size
    assert packed.cu_seqlens.tolist() == [0, 7, 61, length]


def test_memory_of_a_rank_falls_with_the_ranks_that_share_a_sequence():
    layout = {"model": {"n_layers": 1, "vocab_size": 256}, "train": {"batch_size": 1, "seq_len": 16384}}
    alone = estimate(parse_config(tree(layout), "test"), 1)
    shared = estimate(parse_config(tree(layout, divided(4)), "test"), 4)
    assert (alone.micro_batch, shared.micro_batch) == (1, 1)
    assert shared.moment == alone.moment
    # One process holds 1,737 bytes a token. A rank holds 1,848 of its own, keys and values with halos being copies, and
    # 166 of every token of the sequence: compressed keys and values as they came and in order, 64 each, and positions.
    expected = (1848 / 4 + 166) / 1737
    assert shared.parts["activations"] / alone.parts["activations"] == pytest.approx(expected, rel=0.02)
    with pytest.raises(LaunchError, match="and 3 ranks cannot"):
        estimate(parse_config(tree(layout, divided(2)), "test"), 3)


def test_the_page_has_the_formula():
    page = (Path(__file__).parents[2] / "docs" / "long-context.md").read_text()
    rows = [
        line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| [\d,]+ \| \d+ \| [\d,]+ \|", line)
    ]
    assert len(rows) == 9
    for tokens, gpus, share, *gib in ([float(cell.replace(",", "")) for cell in row] for row in rows):
        sizes = {"num_kv_heads": 4, "head_dim_k": 128, "head_dim_v": 128}
        sent = bytes_per_layer("nsa", int(tokens), int(gpus), 1, NSASpec(), **sizes)
        gathered = (3 * 2 + 8) * tokens * 256
        assert share == tokens / gpus
        assert gib == [round(size / 2**30, 2) for size in (sent.forward, sent.backward, gathered)]


def test_bytes_of_a_layer():
    spec = NSASpec()
    sent = bytes_per_layer("nsa", 1 << 20, 8, 1, spec, num_kv_heads=4, head_dim_k=128, head_dim_v=128)
    chunk, numbers = (1 << 20) // 16, 4 * 256
    gathered, halos = 7 * (2 * chunk + 2 * (chunk // 16 + 1)), 2 * (511 + 31)
    assert sent.forward == 2 * numbers * (gathered + halos)
    assert sent.backward == 2 * numbers * gathered + 4 * numbers * (gathered + halos)
    sizes = {"num_kv_heads": 4, "head_dim_k": 128, "head_dim_v": 128, "index_dim": 64}
    msa = bytes_per_layer("msa", 1 << 20, 8, 1, spec, **sizes)
    assert msa.forward == 2 * (numbers + 64) * 7 * 2 * chunk


def test_impossible_layouts_are_refused():
    assert data_ranks(2, 4) == 2
    with pytest.raises(LaunchError, match=r"parallel\.context: 4 ranks share a sequence, and 6 ranks"):
        data_ranks(4, 6)
    with pytest.raises(LaunchError, match="and 1 rank cannot"), start_world(ParallelConfig(context=2), "cpu", {}):
        pass
    for changes, message in (
        (
            {"parallel": {"context": 64}, "train": {"seq_len": 64}},
            "64 tokens cannot be divided into the 128 chunks of 64 ranks",
        ),
        ({"parallel": {"context": 2, "strategy": "single"}}, "use ddp or fsdp"),
        (
            {"parallel": {"context": 2}, "runtime": {"compile": True, "gradient_checkpointing": "selective"}},
            "selective does not work with runtime.compile where ranks share sequences; use none or block",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config(tree(changes), "test")
