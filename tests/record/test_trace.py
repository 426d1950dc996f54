"""Tracing of the backward pass: what is recorded, and what `nsa trace` makes of it."""

import json
import os
import re
import resource
import shutil
from collections import Counter
from itertools import pairwise

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from nsa.cli.trace import trace as trace_command
from nsa.config import parse_config
from nsa.errors import CheckpointError, ConfigError
from nsa.inspect.trace_report import explain
from nsa.nn.model import build_model
from nsa.parallel import transform
from nsa.record import tracer
from nsa.record.tracer import Tracer
from tests.distributed.launching import TINY, start_ranks, wait_all
from tests.record.traced import CONFIG, SPOILED

BACKWARD = [
    *("head", "norm"),
    *(f"blocks.1{part}" for part in ("", ".mlp", ".mlp_norm", ".attention", ".attention_norm")),
    *(f"blocks.0{part}" for part in ("", ".mlp", ".mlp_norm", ".attention", ".attention_norm")),
    "embedding",
]
TOKENS = torch.arange(32).reshape(1, 32)


class TwoLayers(nn.Module):
    """y = second(first(x)), one number each, and two layers that nobody calls, one of them frozen."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(1, 1)
        self.first = nn.Linear(1, 1, bias=False)
        self.second = nn.Linear(1, 1, bias=False)
        self.frozen = nn.Linear(1, 1).requires_grad_(False)
        nn.init.constant_(self.first.weight, 2.0)
        nn.init.constant_(self.second.weight, 3.0)

    def forward(self, x):
        return self.second(self.first(x))


def record(folder, model, *, steps=1, passes=1, inputs=TOKENS, clear=False, close=True, **kinds):
    """Steps without an optimizer. What is not named is traced."""
    tracer = Tracer(folder, 0, **{"grads": True, "modules": True, "buckets": True, **kinds})
    tracer.attach(model, model)
    for step in range(1, steps + 1):
        model.zero_grad()
        tracer.step_begin(step)
        for _ in range(passes):
            model(inputs).sum().backward()
        if clear:
            model.zero_grad()
        tracer.step_end(step, 1.5)
    if close:
        tracer.close()
    return tracer


def events(folder, kind=None, rank=0):
    lines = [json.loads(line) for line in (folder / f"trace_rank{rank}.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in (None, line["event"])]


def names(folder, kind, rank=0):
    return [event["name"] for event in events(folder, kind, rank)]


def decoder(recompute="none", **nsa):
    config = parse_config({**TINY, "nsa": {**TINY["nsa"], **nsa}}, "tiny")
    model = build_model(config, 64, 0)
    transform.recompute(model, recompute)
    return model


def text(folder):
    return "\n".join(explain(folder))


def flat(folder):
    """The same in one line."""
    return " ".join(text(folder).split())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    for ended in wait_all(start_ranks(2, str(folder), module="tests.record.traced")):
        assert ended.code == 0, ended.output
        assert "Warning" not in ended.output, ended.output
    return folder


@pytest.fixture
def copied(two_ranks, tmp_path):
    """A copy of one of the traced runs, to be damaged."""
    return lambda name: shutil.copytree(two_ranks / name, tmp_path / name)


def cut(folder, rank, keep):
    """The rank's trace up to the first line that `keep` refuses, and half of that line."""
    path = folder / f"trace_rank{rank}.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    end = next(i for i, line in enumerate(lines) if not keep(json.loads(line)))
    path.write_text("".join(lines[:end]) + lines[end][: len(lines[end]) // 2])


def test_gradients_are_recorded_in_the_order_of_their_arrival_with_the_values_of_a_hand_calculation(tmp_path):
    record(tmp_path, TwoLayers(), passes=2, inputs=torch.tensor([[1.0], [2.0]]))
    arrived = events(tmp_path, "grad")
    assert [(e["name"], e["order"], e["step"]) for e in arrived] == [
        ("second.weight", 0, 1),
        ("first.weight", 1, 1),
        ("second.weight", 2, 1),
        ("first.weight", 3, 1),
    ]
    assert all(a["time"] <= b["time"] for a, b in pairwise(arrived))
    before, after = events(tmp_path, "digest")
    assert before["before"]
    assert not before["gradients"]
    assert after["gradients"].keys() == {"first.weight", "second.weight"}
    # d/dfirst = second * (1 + 2) = 9 and d/dsecond = first * (1 + 2) = 6, twice; 2.0 is 0x40000000.
    assert after["gradients"]["first.weight"][:2] == [18.0, 18.0]
    assert after["gradients"]["second.weight"][:2] == [12.0, 12.0]
    assert after["parameters"]["first.weight"] == [2.0, 2.0, 0x40000000]
    assert events(tmp_path, "step_end")[0]["loss"] == 1.5


def test_modules_are_recorded_as_backward_comes_to_them(tmp_path):
    record(tmp_path, TwoLayers(), inputs=torch.ones(1, 1))
    assert names(tmp_path, "module_bwd") == ["second", "first"]


def test_a_parameter_without_a_gradient_is_named_and_a_frozen_one_is_not(tmp_path):
    record(tmp_path, TwoLayers(), steps=2, inputs=torch.ones(1, 1))
    assert [e["names"] for e in events(tmp_path, "missing")] == [["unused.weight", "unused.bias"]] * 2
    report = text(tmp_path)
    assert "missing  no gradient in steps 1-2 on rank 0: unused.bias, unused.weight\n" in report
    assert "frozen" not in report


@pytest.mark.parametrize("branch", ["cmp", "sel", "win"])
def test_with_one_branch_forced_nothing_is_missing(tmp_path, branch):
    record(tmp_path, decoder(force_branch=branch))
    assert not events(tmp_path, "missing")
    assert "missing  none" in text(tmp_path)


def test_many_missing_parameters_are_grouped_by_name(tmp_path):
    model = decoder()
    for block in model.blocks:
        block.attention.gate.forward = lambda x: torch.full((*x.shape[:2], 4, 3), 0.5)
    record(tmp_path, model)
    assert "blocks.*.attention.gate.hidden.weight (layers 0-1)" in flat(tmp_path)


@pytest.mark.parametrize("recompute", ["none", "block", "branch"])
def test_every_gradient_and_module_is_recorded_once_a_pass_with_and_without_checkpointing(tmp_path, recompute):
    model = decoder(recompute)
    record(tmp_path, model, steps=2)
    assert Counter(names(tmp_path, "grad")) == {name: 2 for name, _ in model.named_parameters()}
    assert names(tmp_path, "module_bwd") == BACKWARD * 2


def test_compiled_blocks_are_traced_from_outside_with_a_note(tmp_path):
    model = decoder()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="eager")
    record(tmp_path, model)
    assert names(tmp_path, "module_bwd") == ["head", "norm", "blocks.1", "blocks.0", "embedding"]
    assert set(names(tmp_path, "grad")) == {name for name, _ in model.named_parameters()}
    assert "blocks are compiled" in text(tmp_path)


def test_a_traced_model_computes_the_same_gradients(tmp_path):
    plain, traced = decoder("branch"), decoder("branch")
    record(tmp_path, traced)
    plain(TOKENS).sum().backward()
    for (name, a), b in zip(plain.named_parameters(), traced.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_off_means_that_nothing_is_attached_and_nothing_written(tmp_path):
    model = decoder()
    tracer = record(tmp_path, model, grads=False, modules=False, buckets=False)
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not list(tmp_path.iterdir())
    hook = lambda state, bucket: None  # noqa: E731
    assert tracer.traced_hook(hook) is hook


def test_after_close_nothing_is_attached(tmp_path):
    model = decoder()
    record(tmp_path, model)
    before = (tmp_path / "trace_rank0.jsonl").read_bytes()
    assert not any(m._forward_hooks for m in model.modules())
    model(TOKENS).sum().backward()
    assert (tmp_path / "trace_rank0.jsonl").read_bytes() == before


def test_a_rank_that_failed_in_a_step_did_not_end(tmp_path):
    tracer = record(tmp_path, TwoLayers(), inputs=torch.ones(1, 1), close=False)
    tracer.step_begin(2)
    tracer.close()
    assert "rank 0: step 1 complete, in step 2 after 0 of 2 gradients\n" in text(tmp_path)


@pytest.mark.parametrize("is_built", [False, True], ids=["refused", "stopped before its first step"])
def test_a_start_without_a_step_leaves_the_trace_of_the_start_before(tmp_path, is_built):
    hung = record(tmp_path, TwoLayers(), inputs=torch.ones(1, 1), close=False)
    hung.step_begin(2)
    before = text(tmp_path)
    assert "in step 2 after 0 of 2 gradients" in before
    started = Tracer(tmp_path, 0, grads=True, modules=False, buckets=False)
    if is_built:
        started.attach(TwoLayers(), TwoLayers())
    started.close()
    assert text(tmp_path).split(", at ")[0] == before.split(", at ")[0]
    assert "damage" not in text(tmp_path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_a_full_disk_is_counted_and_does_not_stop_training(tmp_path, no_room):
    no_room("trace_rank0.jsonl")
    model = TwoLayers()
    tracer = record(tmp_path, model, inputs=torch.ones(1, 1))
    assert tracer.failures.count >= 5
    assert "No space left" in tracer.failures.last
    assert model.first.weight.grad.item() == 3.0


def test_a_disk_that_has_room_again_gets_a_trace_that_can_be_read(tmp_path):
    path = tmp_path / "later" / "trace_rank0.jsonl"
    model = TwoLayers()
    tracer = record(path.parent, model, inputs=torch.ones(1, 1), close=False)
    assert tracer.failures.count > 0
    path.parent.mkdir()
    tracer.step_begin(2)
    model(torch.ones(1, 1)).sum().backward()
    tracer.step_end(2, 1.0)
    assert "1 of 1 ranks" in text(path.parent)
    assert "rank 0: step 2 complete" in text(path.parent)
    assert "unused.weight" in text(path.parent)


def test_a_line_that_fitted_in_part_damages_no_other(tmp_path):
    model, path = TwoLayers(), tmp_path / "trace_rank0.jsonl"
    tracer = record(tmp_path, model, inputs=torch.ones(1, 1), close=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
    try:
        tracer.step_begin(2)
        model(torch.ones(1, 1)).sum().backward()
        tracer.step_end(2, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert tracer.failures.count >= 5
    tracer.step_begin(3)
    model(torch.ones(1, 1)).sum().backward()
    tracer.step_end(3, 1.0)
    report = text(tmp_path)
    assert "1 line was damaged" in report
    assert "rank 0: step 3 complete" in report
    starts = [line for line in path.read_text().splitlines() if '"event": "start"' in line]
    assert ['"continued": true' in line for line in starts] == [False, True], "one start of the run"


def test_values_that_are_not_finite_stay_json(tmp_path):
    model = TwoLayers()
    nn.init.constant_(model.second.weight, float("inf"))
    record(tmp_path, model, inputs=torch.zeros(1, 1))
    lines = (tmp_path / "trace_rank0.jsonl").read_text().splitlines()
    parsed = [json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON")) for line in lines]
    assert next(e for e in reversed(parsed) if e["event"] == "digest")["parameters"]["second.weight"][0] == "inf"


def test_a_step_whose_gradients_were_cleared_is_recorded_as_such(tmp_path):
    record(tmp_path, TwoLayers(), inputs=torch.ones(1, 1), clear=True)
    assert [event["cleared"] for event in events(tmp_path, "digest")] == [False, True]


def test_a_large_trace_becomes_two_files_that_are_read_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tracer, "_LARGEST_FILE", 3000)
    record(tmp_path, TwoLayers(), steps=5, inputs=torch.ones(1, 1), close=False)
    assert (tmp_path / "trace_rank0.older.jsonl").exists()
    assert all(path.stat().st_size < 6000 for path in tmp_path.iterdir())
    assert "rank 0: step 5 complete" in text(tmp_path)
    assert "no gradient in steps" in text(tmp_path)


def test_only_the_last_attempt_is_explained(tmp_path):
    model = TwoLayers()
    record(tmp_path, model, steps=4, inputs=torch.ones(1, 1))
    path = tmp_path / "trace_rank0.jsonl"
    path.write_text(path.read_text()[:-20])  # killed while it wrote
    record(tmp_path, model, steps=1, inputs=torch.ones(1, 1), close=False)
    report = text(tmp_path)
    assert "rank 0: step 1 complete" in report
    assert "1 line was damaged" in report


def test_ranks_of_an_earlier_and_larger_world_are_not_explained(copied):
    folder = copied("ddp")
    old = (folder / "trace_rank1.jsonl").read_text().replace('"world_size": 2', '"world_size": 3')
    (folder / "trace_rank2.jsonl").write_text(re.sub(r'("time": )(\d+)', lambda m: f"{m[1]}{int(m[2]) - 60}", old))
    assert "trace    2 of 2 ranks" in text(folder)


def test_ranks_that_agree_are_reported_as_equal(two_ranks):
    report = text(two_ranks / "ddp")
    assert "ranks 0-1: step 2 complete, ended" in report
    assert "order    the same on all ranks in steps 1-2" in report
    assert "every bucket that started was done" in report
    assert "values   the same on all ranks in steps 1-2" in report
    first, second = (events(two_ranks / "ddp", "digest", rank) for rank in (0, 1))
    assert [(e["gradients"], e["parameters"]) for e in first] == [(e["gradients"], e["parameters"]) for e in second]


def test_buckets_hold_every_parameter_once_and_are_recorded_when_they_start_and_when_they_are_done(two_ranks):
    model = build_model(CONFIG, 64, 0)
    sizes = {name: 4 * p.numel() for name, p in model.named_parameters()}
    for step in (1, 2):
        buckets = [e for e in events(two_ranks / "ddp", "bucket", 1) if e["step"] == step]
        started, done = ([b for b in buckets if (b["done"] is None) == wanted] for wanted in (True, False))
        assert sorted(b["index"] for b in started) == sorted(b["index"] for b in done)
        assert all(b["done"] >= b["started"] for b in done)
        assert sorted(name for b in done for name in b["parameters"]) == sorted(sizes)
        assert all(b["bytes"] == sum(sizes[name] for name in b["parameters"]) for b in done)
    assert len(done) > 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_over_nccl_the_same_is_recorded(tmp_path):
    (ended,) = wait_all(start_ranks(1, str(tmp_path), "cuda", module="tests.record.traced"), 300)
    assert ended.code == 0, ended.output
    gradients = {name: 2 for name, _ in build_model(CONFIG, 64, 0).named_parameters()}
    for strategy, passes in (("ddp", 2), ("fsdp", 1)):
        seen = Counter(names(tmp_path / strategy, "grad"))
        assert seen == {name: count * passes for name, count in gradients.items()}
        assert names(tmp_path / strategy, "module_bwd") == BACKWARD * 2 * passes
    assert "every bucket that started was done" in text(tmp_path / "ddp")
    assert all(e["done"] >= e["started"] for e in events(tmp_path / "ddp", "bucket") if e["done"] is not None)


def test_the_first_gradient_that_differs_is_named_with_both_values(two_ranks):
    report = text(two_ranks / "differs")
    assert f"values   DIFFERS first in step 2: gradient of {SPOILED}" in report
    shown = re.findall(r"rank (\d): sum (\S+), norm (\S+), checksum\s+(\w+)", report)
    assert [rank for rank, *_ in shown] == ["0", "1"]
    assert shown[0][1:] != shown[1][1:]


@pytest.mark.parametrize(
    ("kind", "found"),
    [("digest", "before the first step: parameter embedding.weight"), ("step_end", "in step 1: the loss")],
)
def test_a_parameter_or_a_loss_that_differs_is_named_with_its_step(copied, kind, found):
    folder = copied("ddp")
    recorded = events(folder, rank=1)
    changed = next(event for event in recorded if event["event"] == kind)
    if kind == "step_end":
        changed["loss"] += 1e-15
    else:
        changed["parameters"]["embedding.weight"][2] += 1
    (folder / "trace_rank1.jsonl").write_text("".join(json.dumps(event) + "\n" for event in recorded))
    assert f"values   DIFFERS first {found}\n" in text(folder)


def test_a_sharded_model_shows_gradients_missing_ones_and_the_lack_of_digests(two_ranks):
    model = build_model(CONFIG, 64, 0)
    for rank in (0, 1):
        assert Counter(names(two_ranks / "fsdp", "grad", rank)) == {n: 2 for n, _ in model.named_parameters()}
        assert names(two_ranks / "fsdp", "module_bwd", rank) == BACKWARD * 2
    report = text(two_ranks / "fsdp")
    assert "missing  no gradient in steps 1-2 on ranks 0-1: aside.bias, aside.weight\n" in report
    assert "values   the same on all ranks in steps 1-2" in report
    assert "digests: not recorded for sharded tensors" in report


def test_a_hang_shows_the_rank_that_stopped_first_and_the_bucket_that_waits_for_it(copied):
    folder = copied("ddp")
    order = [e["name"] for e in events(folder, "grad", 1) if e["step"] == 1]
    seen = Counter()

    def until_fifth_gradient(event):
        seen[event["event"]] += event["step"] == 2
        return seen["grad"] < 6

    cut(folder, 1, until_fifth_gradient)
    cut(folder, 0, lambda e: e["event"] != "bucket" or e["step"] != 2 or e["done"] is None)
    report = flat(folder)
    assert f"rank 1: step 1 complete, in step 2 after 5 of {len(order)} gradients; BEHIND THE OTHERS" in report
    assert f"next would be the gradient of {order[5]}" in report
    assert "rank 0: step 1 complete, in step 2 after" in report
    assert "bucket 0 of step 2 started and was never done on rank 0" in report
    assert "2 lines were damaged" in report
    assert report.index("rank 1:") < report.index("rank 0:")


def test_a_hang_in_the_first_backward_names_the_missing_gradients(tmp_path):
    record(tmp_path, decoder())
    cut(tmp_path, 0, lambda e: e.get("name") != "blocks.1.mlp_norm.weight")
    report = flat(tmp_path)
    assert "rank 0: no step complete, in step 1 after" in report
    assert "last: backward #5 blocks.1.mlp_norm, at" in report
    assert "no gradient in step 1 on rank 0: blocks.*.attention.gate.hidden.bias (layers 0-1), blocks" in report


def test_another_order_of_arrival_is_shown_where_it_begins(copied):
    folder = copied("ddp")
    path = folder / "trace_rank1.jsonl"
    fourth, fifth = names(folder, "grad")[3:5]
    lines = path.read_text().splitlines()
    places = [i for i, line in enumerate(lines) if '"event": "grad"' in line][3:5]
    for place, old, new in zip(places, (fourth, fifth), (fifth, fourth), strict=True):
        lines[place] = lines[place].replace(f'"{old}"', f'"{new}"')
    path.write_text("\n".join(lines))
    report = text(folder)
    assert "order    DIFFERS first in step 1: gradient #4\n" in report
    assert f"  rank 0: {fourth}" in report
    assert f"  rank 1: {fifth}" in report


def test_a_rank_without_a_trace_is_absent(copied):
    folder = copied("ddp")
    (folder / "trace_rank1.jsonl").unlink()
    assert "absent   rank 1: left no trace of this start" in text(folder)


def test_a_rank_that_started_again_and_has_not_traced_yet_is_absent(copied):
    folder = copied("ddp")
    begun = {rank: events(folder, "start", rank)[0]["time"] for rank in (0, 1)}
    for rank, booted in ((0, begun[0] - 1), (1, begun[1] + 60)):
        boot = {"time": booted, "step": 0, "event": "boot", "rank": rank}
        (folder / f"heartbeat_rank{rank}.jsonl").write_text(json.dumps(boot) + "\n")
    assert "absent   rank 1: left no trace of this start" in text(folder)
    assert "BEHIND" not in text(folder)


def test_damaged_traces_are_read_as_far_as_they_go(copied):
    folder = copied("ddp")
    path = folder / "trace_rank1.jsonl"
    start = json.dumps({**events(folder, "start")[0], "continued": True, "world_size": 10**12})
    wrong = [
        start,
        '{"event": "grad"}',
        "[1]",
        "nul",
        '{"event": "grad", "time": 1, "step": 1, "name": 3}',
        "\x00\x1b[2J",
    ]
    path.write_bytes(path.read_bytes() + "\n".join(wrong).encode() + b"\n\xff\xfe\n")
    report = text(folder)
    assert "7 lines were damaged" in report
    assert "step 2 complete" in report


def test_the_command_prints_at_most_eighty_columns_or_how_to_switch_tracing_on(two_ranks, tmp_path):
    app = typer.Typer()
    app.command()(trace_command)
    for name in ("ddp", "differs", "fsdp"):
        done = CliRunner().invoke(app, [str(two_ranks / name)])
        assert done.exit_code == 0
        assert done.output.startswith("trace    2 of 2 ranks since")
        assert max(map(len, done.output.splitlines())) <= 80
        assert len(done.output.splitlines()) < 24
    for folder, kind in ((tmp_path, ConfigError), (tmp_path / "nowhere", CheckpointError)):
        failed = CliRunner().invoke(app, [str(folder)])
        assert isinstance(failed.exception, kind)
    assert "telemetry.trace_grads=true" in str(CliRunner().invoke(app, [str(tmp_path)]).exception)
