"""Gate and selection statistics are the numbers one computes by hand, layer by layer, whatever wraps the model."""

import csv
import itertools
import json
import math
import re
from dataclasses import asdict, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.checks.artifacts import check_artifacts
from nsa.config import load_config, parse_config
from nsa.inspect.reading import read_run
from nsa.inspect.run_files import merged
from nsa.inspect.run_report import render
from nsa.inspect.view import frame
from nsa.nn import NSAAttention
from nsa.nn.attention import attention_layers
from nsa.ops import MSASpec, NSASpec, dispatch, index_blocks, msa_attention
from nsa.ops.branches import selected_node
from nsa.ops.layout import token_layout
from nsa.ops.observe import notify, observing
from nsa.record import attention_stats
from nsa.record.attention_stats import (
    AttentionObserver,
    gate_numbers,
    mass_numbers,
    read_gates,
    read_mass,
    read_selection,
    selection_numbers,
)
from nsa.run_folder import ALL_LAYERS, DISTANCE_BINS, LAYER_SELECTION, TRAINING, read_rows
from nsa.train import train
from tests.train.test_feed import TINY

SPEC = NSASpec(cmp_block=4, cmp_stride=2, sel_block=4, num_selected=4, num_init=1, num_local=2, window=8)
MSA = MSASpec(block=16, num_selected=2)


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


def msa_inputs(tokens, batch=1, heads=4, groups=2):
    """q, k, v, index_q and index_k."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, 16), (groups, 16), (groups, 16), (groups, 16), (16,)]
    return [2 * torch.randn(batch, tokens, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def masses_by_hand(q, k, index_q, index_k, borders, cu_seqlens):
    """Of every query that chooses, by sequence and token: the share of the attention that its blocks hold, by head."""
    batch, tokens, heads, size = q.shape
    blocks = index_blocks(index_q, index_k, MSA, cu_seqlens=cu_seqlens)
    found = {}
    for b, t in itertools.product(range(batch), range(tokens)):
        start = max(border for border in borders[:-1] if border <= t)
        if t - start >= MSA.dense_tokens:
            for head in range(heads):
                g = head // (heads // k.shape[2])
                share = (k[b, start : t + 1, g] @ q[b, t, head] / math.sqrt(size)).softmax(0)
                read = [j for j in range(t + 1 - start) if j // MSA.block in blocks[b, t, g].tolist()]
                found.setdefault((b, t), []).append(share[read].sum().item())
    return found


@pytest.mark.parametrize(
    ("borders", "batch"), [([0, 90], 1), ([0, 70], 3), ([0, 20, 75, 130], 1)], ids=["one", "a batch", "packed"]
)
@pytest.mark.parametrize("sampled", [1000, 4])
def test_mass_by_hand(monkeypatch, borders, batch, sampled):
    monkeypatch.setattr(attention_stats, "SAMPLED", sampled)
    monkeypatch.setattr(attention_stats, "MAX_ELEMENTS", 37 * batch * max(sampled // batch, 8) * 4)  # few keys at once
    q, k, v, *index = msa_inputs(borders[-1], batch)
    counted = torch.rand(q.shape[:2], generator=torch.Generator().manual_seed(1)) > 0.2
    packed = torch.tensor(borders, dtype=torch.int32) if len(borders) > 2 else None
    observer = AttentionObserver({"selection": ["a"], "mass": ["a"]})
    with observing(observer):
        msa_attention(q, k, v, *index, MSA, counted=counted, cu_seqlens=packed)
    observer.finish(1)
    [sample] = observer.ready()
    total = weight = 0.0
    found = masses_by_hand(q, k, *index, borders, packed)
    for b in range(batch):
        rows = [masses for (row, t), masses in found.items() if row == b and counted[row, t]]
        per_sequence = max(1, sampled // batch)
        picked = rows
        if len(rows) > per_sequence:  # the middle of each of as many equal parts
            picked = [rows[(2 * n + 1) * len(rows) // (2 * per_sequence)] for n in range(per_sequence)]
        total += len(rows) * sum(map(sum, picked)) / len(picked) / 4
        weight += len(rows)
    assert 0.2 < total / weight < 0.9
    assert sample.selection["a"].mass == pytest.approx(total / weight, rel=1e-9)
    assert sample.selection[ALL_LAYERS].mass == sample.selection["a"].mass
    assert observer.failures == 0


def test_parts_of_a_sequence_on_two_ranks_have_the_statistics_of_the_whole(monkeypatch):
    """As under context parallelism: of four chunks a rank has the first and the last, the other one those between."""
    monkeypatch.setattr(attention_stats, "SAMPLED", 1000)
    borders = torch.tensor([0, 20, 160], dtype=torch.int32)
    q, k, v, index_q, index_k = msa_inputs(160)
    gathered = []
    ranks = [
        AttentionObserver({"selection": ["a"], "mass": ["a"]}, lambda x: gathered.append(x) or x[None]),
        AttentionObserver({"selection": ["a"], "mass": ["a"]}, lambda x: torch.stack([gathered.pop(0), x])),
    ]
    for observer, chunks in zip(ranks, ((0, 3), (1, 2)), strict=True):
        with observing(observer):
            for chunk in chunks:
                rows, stop = slice(40 * chunk, 40 * chunk + 40), 40 * chunk + 40
                part = {"cu_seqlens": borders.clamp(max=stop), "q_offset": rows.start}
                blocks = index_blocks(index_q[:, rows], index_k[:, :stop], MSA, **part)
                for g in range(2):
                    head = q[:, rows, 2 * g : 2 * g + 2], k[:, :stop, g : g + 1]
                    lse = selected_node(
                        *head, v[:, :stop, g : g + 1], blocks[:, :, g : g + 1], MSA.block, *part.values(), None
                    )[1]
                    counted = token_layout(stop, part["cu_seqlens"], "cpu").position[None, rows] >= MSA.dense_tokens
                    notify("attended", *head, lse, counted, *part.values())
        observer.finish(1)
    alone = AttentionObserver({"selection": ["a"], "mass": ["a"]})
    with observing(alone):
        msa_attention(q, k, v, index_q, index_k, MSA, cu_seqlens=borders)
    alone.finish(1)
    [parted], [whole] = ranks[1].ready(), alone.ready()
    got, wanted = parted.selection["a"], whole.selection["a"]
    assert got.agreement == pytest.approx(wanted.agreement, abs=0.02)  # chunks are not compared with each other
    assert got.mass == pytest.approx(wanted.mass, rel=1e-9)
    assert replace(got, agreement=0.0, mass=None) == replace(wanted, agreement=0.0, mass=None)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("is_dense", [False, True])
def test_layers_that_select_nothing_in_a_pass_are_left_out(is_dense, parts):
    """As MSA layers do in a warm-up; the layer between is one of NSA."""
    gather = None if parts == 1 else lambda x: x[None]
    observer = AttentionObserver({"gates": [], "selection": ["a", "b", "c"], "mass": ["a", "c"]}, gather)
    for name, _ in itertools.product("abc", range(parts)):
        with observing(observer):
            if name == "b":
                observer.selected(torch.zeros(1, 8, 1, 4, dtype=torch.int32), SPEC, None)
            else:
                msa_attention(*msa_inputs(60), MSA, is_dense=is_dense)
    observer.finish(1)
    [sample] = observer.ready()
    assert list(sample.selection) == (["b", ALL_LAYERS] if is_dense else ["a", "b", "c", ALL_LAYERS])
    assert sample.selection["b"].mass is None
    assert sample.selection["b"].rows == 8 * parts
    assert all((s.mass is None) == (is_dense or name == "b") for name, s in sample.selection.items())


class NoWaiting(TorchDispatchMode):
    """Refuses what would make the host wait for a GPU: values read back, or copied there from a list."""

    WAITS = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = [x for x in args[1] if x is not None and x.dtype == torch.bool] if name == "index" else []
        if name in self.WAITS or masks:
            raise AssertionError(f"{name} waits for the device")
        return function(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is computed."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not function.is_view:
            self.elements = max(self.elements, result.numel())
        return result


def test_memory_for_the_mass_does_not_grow_with_the_product_of_queries_and_keys(monkeypatch):
    monkeypatch.setattr(attention_stats, "MAX_ELEMENTS", 4096)
    q, k, *_ = msa_inputs(3000)
    with Largest() as largest:
        mass_numbers(q, k, q[..., 0], q[..., 0, 0] > 0, None)
    assert 3000 <= largest.elements <= 4096


@pytest.mark.parametrize("lengths", [[96], [40, 8, 48]])
def test_a_sample_never_waits_for_the_device(lengths):
    borders = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    indices = torch.randint(-1, 8, (1, 96, 2, 4), dtype=torch.int32)
    observer = AttentionObserver({"gates": ["only"], "selection": ["only"], "mass": ["only"]})
    q, k, *_ = msa_inputs(96)
    with NoWaiting():
        observer.selected(indices, SPEC, borders if len(lengths) > 1 else None)
        observer.attended(q, k, q[..., 0], q[..., 0, 0] > 0, borders if len(lengths) > 1 else None)
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
    q, k, *_ = msa_inputs(96)
    attended = (q, k, q[..., 0] - 9.0, q[..., 0, 0] > 0, borders)
    observer = AttentionObserver({"gates": ["only"], "selection": ["only"], "mass": ["only"]})
    inputs = [x if x is None else x.cuda() for x in (indices, borders, gates, *attended)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        observer.selected(inputs[0], SPEC, inputs[1])
        observer.attended(*inputs[3:])
        observer.mixed(inputs[2])
        observer.finish(1)
        observer.ready()  # gives none, or the sample, and waits for neither
    finally:
        torch.cuda.set_sync_debug_mode("default")
    observer.selected(inputs[0], SPEC, inputs[1])
    observer.attended(*inputs[3:])
    observer.mixed(inputs[2])
    observer.finish(2)
    sample = observer.ready(wait=True)[-1]
    assert sample.step == 2
    found = sample.selection[ALL_LAYERS]
    assert found.mass == pytest.approx(read_mass(mass_numbers(*attended)), rel=1e-9)
    assert replace(found, mass=None) == read_selection(selection_numbers(indices, SPEC, borders))
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
    by_rank = merged([sample.gates["a"], sample.gates["b"]])
    for parts, whole in ((sample.gates["all"], mixed), (by_rank, mixed), (sample.selection["all"], selected)):
        for name, value in asdict(whole).items():
            wanted = value if value is None else pytest.approx(value, rel=1e-6)
            assert getattr(parts, name) == wanted, name


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


def test_a_run_with_msa_records_its_index_loss_and_the_mass_of_its_blocks(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    warmup, layers = 2, ["model.n_layers=2", "model.layer_pattern=[msa, nsa]"]
    sizes = ["train.seq_len=64", "msa.block=16", "msa.num_selected=2", f"msa.warmup_steps={warmup}"]
    changes = ["data.source=synthetic", "telemetry.every=1", "telemetry.tensorboard=true", "train.log_every=1"]
    train(parse_config({}, "test", [*TINY, *layers, *sizes, *changes]), tmp_path)
    rows = read_rows(tmp_path, TRAINING)
    index_kl = [float(row["index_kl"]) for row in rows]
    assert len(index_kl) == 4
    assert all(value > 0 for value in index_kl)
    assert f"grad_norm {float(rows[0]['grad_norm']):.2f} | index_kl {index_kl[0]:.4f}\n" in capsys.readouterr().out
    by_layer = {(int(row["step"]), row["layer"]): row["mass"] for row in read_rows(tmp_path, LAYER_SELECTION)}
    names = ["blocks.0.attention", "blocks.1.attention"]
    assert list(by_layer) == [(1, names[1]), (2, names[1]), *itertools.product((3, 4), names)]
    assert [bool(mass) for mass in by_layer.values()] == [False, False, True, False, True, False]
    curves = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [point.value for point in curves.Scalars("train/index_kl")] == pytest.approx(index_kl, rel=1e-6)
    masses = {point.step: point.value for point in curves.Scalars("selection/mass")}
    assert masses == pytest.approx({step: float(by_layer[step, names[0]]) for step in (3, 4)}, rel=1e-6)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert (metrics["index_kl"], metrics["telemetry_failures"]) == (index_kl[-1], 0)
    assert metrics["selection"]["mass"] == float(by_layer[4, names[0]])
    assert [a for a in check_artifacts(tmp_path, load_config(tmp_path / "config.yaml"), 1) if not a.ok] == []
    view = read_run(tmp_path)
    page = render(view)
    for identity in ("plot-index-kl", "plot-mass"):
        assert re.search(rf'<figure[^>]* id="{identity}".*?<svg', page, re.DOTALL), identity
    assert f"<td class=num>{metrics['selection']['mass']:.1%}</td>" in page
    assert "sparse" in next(entry.message for entry in view.timeline if entry.kind == "attention")
    shown = frame(view, 160).plain
    assert f"index_kl {index_kl[-1]:.4f}" in shown
    assert f"mass {metrics['selection']['mass']:.1%}" in shown


def test_layers_are_found_by_type_in_the_order_they_run(tmp_path):
    model = torch.nn.Sequential(NSAAttention(32, 4, 2, 16, spec=SPEC), torch.nn.Identity())
    assert [name for name, _ in attention_layers(model)] == ["0"]
