"""Gate and selection statistics are the numbers one computes by hand, layer by layer, whatever wraps the model."""

import csv
import itertools
import json
import math
from dataclasses import asdict

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.config import parse_config
from nsa.nn import NSAAttention
from nsa.nn.attention import attention_layers
from nsa.ops import NSASpec, dispatch
from nsa.ops.observe import observing
from nsa.record.attention_stats import (
    AttentionObserver,
    gate_numbers,
    read_gates,
    read_selection,
    selection_numbers,
)
from nsa.run_folder import ALL_LAYERS, DISTANCE_BINS, GateStats
from nsa.train import train
from tests.train.test_feed import TINY

SPEC = NSASpec(cmp_block=4, cmp_stride=2, sel_block=4, num_selected=4, num_init=1, num_local=2, window=8)


def entropy(*shares):
    return -sum(s * math.log(s) for s in shares if s)


def test_gates_by_hand():
    rows = [[1.0, 1.0, 1.0], [0.5, 0.25, 0.25], [0.97, 0.01, 0.02], [0.0, 0.2, 0.0]]
    stats = read_gates(gate_numbers(torch.tensor(rows).view(1, 2, 2, 3)))
    shares = [[v / sum(row) for v in row] for row in rows]
    assert stats.rows == 4
    assert stats.mean_entropy == pytest.approx(sum(entropy(*s) for s in shares) / 4, rel=1e-6)
    assert stats.min_entropy == pytest.approx(0.0, abs=1e-6)
    assert stats.largest_share == pytest.approx(1.0)
    assert stats.collapsed == pytest.approx(2 / 4)
    for branch in range(3):
        mean = sum(s[branch] for s in shares) / 4
        assert (stats.share_cmp, stats.share_sel, stats.share_win)[branch] == pytest.approx(mean, rel=1e-6)


def by_hand(indices, positions, spec):
    """The same in plain Python loops."""
    rows = blocks = full = forced = agreeing = compared = most = 0
    histogram = [0] * len(DISTANCE_BINS)
    for t, position in enumerate(positions):
        own = position // spec.sel_block
        for g in range(len(indices[t])):
            chosen = [j for j in indices[t][g] if j >= 0]
            rows, blocks, most = rows + 1, blocks + len(chosen), max(most, len(chosen))
            full += len(chosen) == spec.num_selected
            forced += sum(j < spec.num_init or own - j < spec.num_local for j in chosen)
            for j in chosen:
                histogram[min((own - j).bit_length(), len(DISTANCE_BINS) - 1)] += 1
            if position:
                agreeing += len(set(chosen) & {j for j in indices[t - 1][g] if j >= 0})
                compared += len(chosen)
    return rows, blocks / rows, most, full / rows, forced / blocks, agreeing / compared, [h / blocks for h in histogram]


@pytest.mark.parametrize("lengths", [[96], [40, 8, 48], [1, 1, 94]])
def test_selection_by_hand(lengths):
    generator = torch.Generator().manual_seed(0)
    positions = [p for length in lengths for p in range(length)]
    table = []
    for position in positions:
        own = position // 4
        row = []
        for _ in range(2):
            forced = {0, own, max(0, own - 1)}
            others = [j for j in range(own + 1) if j not in forced]
            drawn = torch.randperm(len(others), generator=generator).tolist()[: 4 - len(forced)]
            chosen = sorted(forced | {others[d] for d in drawn})
            row.append(chosen + [-1] * (4 - len(chosen)))
        table.append(row)
    borders = [0]
    for length in lengths:
        borders.append(borders[-1] + length)
    cu_seqlens = None if len(lengths) == 1 else torch.tensor(borders, dtype=torch.int32)
    stats = read_selection(selection_numbers(torch.tensor([table], dtype=torch.int32), SPEC, cu_seqlens))
    rows, mean, most, full, forced, agreement, histogram = by_hand(table, positions, SPEC)
    assert stats.rows == rows
    assert stats.mean_distinct == pytest.approx(mean)
    assert stats.max_distinct == most
    assert stats.share_at_max == pytest.approx(full)
    assert stats.share_forced == pytest.approx(forced)
    assert stats.agreement == pytest.approx(agreement)
    assert stats.distances == pytest.approx(tuple(histogram))
    assert sum(stats.distances) == pytest.approx(1.0)


class NoWaiting(TorchDispatchMode):
    """Refuses what would make the host wait for a GPU: values read back, or copied there from a list."""

    WAITS = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = [x for x in args[1] if x is not None and x.dtype == torch.bool] if name == "index" else []
        if name in self.WAITS or masks:
            raise AssertionError(f"{name} waits for the device")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("lengths", [[96], [40, 8, 48]])
def test_a_sample_never_waits_for_the_device(lengths):
    borders = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    indices = torch.randint(-1, 8, (1, 96, 2, 4), dtype=torch.int32)
    observer = AttentionObserver({"gates": ["only"], "selection": ["only"]})
    with NoWaiting():
        observer.selected(indices, SPEC, borders if len(lengths) > 1 else None)
        observer.mixed(torch.rand(1, 96, 4, 3))
        observer.finish(1)
    assert len(observer.ready()) == 1
    with pytest.raises(AssertionError, match="waits"), NoWaiting():
        float(indices.sum())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("packed", [False, True])
def test_on_a_gpu_a_sample_never_waits_for_it_and_is_that_of_the_cpu(packed):
    borders = torch.tensor([0, 40, 48, 96], dtype=torch.int32) if packed else None
    indices = torch.randint(-1, 8, (1, 96, 2, 4), dtype=torch.int32)
    gates = torch.rand(1, 96, 4, 3)
    observer = AttentionObserver({"gates": ["only"], "selection": ["only"]})
    inputs = [x if x is None else x.cuda() for x in (indices, borders, gates)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        observer.selected(inputs[0], SPEC, inputs[1])
        observer.mixed(inputs[2])
        observer.finish(1)
        observer.ready()  # gives none, or the sample, and waits for neither
    finally:
        torch.cuda.set_sync_debug_mode("default")
    observer.selected(inputs[0], SPEC, inputs[1])
    observer.mixed(inputs[2])
    observer.finish(2)
    sample = observer.ready(wait=True)[-1]
    assert sample.step == 2
    assert sample.selection[ALL_LAYERS] == read_selection(selection_numbers(indices, SPEC, borders))
    expected = asdict(read_gates(gate_numbers(gates)))
    assert asdict(sample.gates[ALL_LAYERS]) == pytest.approx(expected, rel=1e-5)


def test_merged_layers_and_ranks_equal_the_statistics_of_all_rows():
    generator = torch.Generator().manual_seed(1)
    gates = torch.rand(2, 8, 4, 3, generator=generator)
    indices = torch.sort(torch.randint(0, 8, (2, 32, 1, 4), generator=generator, dtype=torch.int32)).values
    observer = AttentionObserver({"gates": ["a", "b"], "selection": ["a", "b"]})
    for part in gates:
        observer.mixed(part[None])
    for part in indices:
        observer.selected(part[None], SPEC, None)
    observer.finish(1)
    [sample] = observer.ready()
    mixed, selected = read_gates(gate_numbers(gates)), read_selection(selection_numbers(indices, SPEC, None))
    by_rank = GateStats.merge([sample.gates["a"], sample.gates["b"]])
    for parts, whole in ((sample.gates["all"], mixed), (by_rank, mixed), (sample.selection["all"], selected)):
        for name in whole.__dataclass_fields__:
            assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-6), name


def test_a_layer_is_observed_only_inside_observing_and_computes_the_same():
    torch.manual_seed(0)
    layer = NSAAttention(32, 4, 2, 16, spec=SPEC)
    x = torch.randn(1, 64, 32)
    plain = layer(x)
    observer = AttentionObserver({"gates": ["only"], "selection": ["only"]})
    with observing(observer):
        watched = layer(x)
    layer(x)
    observer.finish(7)
    (sample,) = observer.ready()
    assert torch.equal(plain, watched)
    assert sample.step == 7
    assert list(sample.gates) == list(sample.selection) == ["only", ALL_LAYERS]
    assert sample.gates[ALL_LAYERS].rows == 64 * 4
    assert sample.selection[ALL_LAYERS].rows == 64 * 2
    by_hand = read_gates(gate_numbers(layer.gate(x)))
    assert sample.gates[ALL_LAYERS].mean_entropy == pytest.approx(by_hand.mean_entropy, rel=1e-6)
    assert observer.ready() == []


def test_an_observer_that_fails_is_removed_and_the_layer_continues():
    class Broken(AttentionObserver):
        def mixed(self, gates):
            raise RuntimeError("no")

    observer = Broken(["a"])
    layer = NSAAttention(32, 4, 2, 16, spec=SPEC)
    with observing(observer):
        layer(torch.randn(1, 32, 32))
        layer(torch.randn(1, 32, 32))
    assert observer.failures == 1


def test_a_rank_without_statistics_drops_those_of_its_context_group():
    def gather(mine):
        return torch.stack([mine, torch.full_like(mine, torch.nan)])

    observer = AttentionObserver({"gates": ["a"], "selection": ["a"]}, gather)
    observer.mixed(torch.rand(1, 8, 4, 3))
    observer.finish(1)
    [sample] = observer.ready()
    assert (sample.step, sample.gates, sample.selection) == (1, {}, {})


@pytest.mark.parametrize("recompute", ["none", "block", "branch"])
def test_a_run_samples_every_layer_once_with_and_without_recomputation(tmp_path, recompute):
    texts = tmp_path / "a.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{n} is a number " * 6}) + "\n" for n in range(60)))
    config = parse_config(
        {},
        "test",
        [
            *TINY,
            "data.source=text",
            f"data.paths=[{texts}]",
            "model.n_layers=3",
            "telemetry.every=2",
            f"runtime.gradient_checkpointing={recompute}",
        ],
    )
    dispatch._count_fallback("decode", "what the process did before", on_gpu=False)
    train(config, tmp_path / "run")
    gates = list(csv.DictReader((tmp_path / "run" / "gate_stats.csv").open()))
    names = [f"blocks.{n}.attention" for n in range(3)]
    assert [(row["step"], row["layer"]) for row in gates] == [
        (step, layer) for step in ("1", "2", "4") for layer in (*names, "all")
    ]
    assert all(int(row["rows"]) == 4 * 32 * 2 for row in gates if row["layer"] != "all")
    assert all(abs(sum(float(row[f"share_{b}"]) for b in ("cmp", "sel", "win")) - 1) < 1e-6 for row in gates)
    selection = list(csv.DictReader((tmp_path / "run" / "k_stats.csv").open()))
    assert [row["step"] for row in selection] == ["1", "2", "4"]
    assert all(int(row["rows"]) == 3 * 4 * 32 for row in selection)
    by_layer = list(csv.DictReader((tmp_path / "run" / "k_stats_layers.csv").open()))
    assert [(row["step"], row["layer"]) for row in by_layer] == [
        (step, name) for step in ("1", "2", "4") for name in names
    ]
    for row in selection:  # over all layers is the mean of layers that saw as many rows
        layers = [other for other in by_layer if other["step"] == row["step"]]
        assert sum(float(layer["mean_distinct"]) for layer in layers) / 3 == pytest.approx(float(row["mean_distinct"]))
        assert all(int(layer["rows"]) == 4 * 32 for layer in layers)
    fallbacks = list(csv.DictReader((tmp_path / "run" / "fallback_counters.csv").open()))
    assert {row["branch"] for row in fallbacks} == {"phi", "cmp", "select", "sel", "win", "mix"}
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["gates"]["rows"] == 3 * 4 * 32 * 2


def test_layers_are_found_by_type_in_the_order_they_run(tmp_path):
    model = torch.nn.Sequential(NSAAttention(32, 4, 2, 16, spec=SPEC), torch.nn.Identity())
    assert [name for name, _ in attention_layers(model)] == ["0"]
