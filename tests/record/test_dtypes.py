"""The audit of types and the size of the optimizer's state."""

import resource

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from nsa.config import parse_config
from nsa.nn.model import build_model
from nsa.record.dtypes import (
    DTYPES_FILE,
    OPTIMIZER_STATE_FILE,
    optimizer_line,
    write_dtypes_report,
    write_optimizer_state,
)

MODEL = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim_k": 16, "head_dim_v": 16}
NSA = {"cmp_block": 4, "cmp_stride": 2, "sel_block": 4, "num_selected": 3, "num_init": 1, "num_local": 1, "window": 5}
VOCAB = 64


def decoder_and_optimizer():
    config = parse_config({"model": MODEL, "nsa": NSA}, "test")
    decoder = build_model(config, VOCAB, seed=0)
    return decoder, torch.optim.AdamW(decoder.parameters(), fused=True)


def step(model, optimizer, inputs):
    model(inputs).square().mean().backward()
    optimizer.step()


def tokens():
    return torch.randint(0, VOCAB, (1, 16))


def report(folder, model, optimizer):
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    write_dtypes_report(folder, parameters, buffers, optimizer)
    return (folder / DTYPES_FILE).read_text().splitlines()


def rows(lines):
    """The full list at the end."""
    start = next(i for i, line in enumerate(lines) if line.startswith("kind") and line.endswith("name"))
    return lines[start + 1 :]


def counts(lines):
    start = next(i for i, line in enumerate(lines) if line.startswith("kind") and line.endswith("tensors"))
    return [line.rsplit(maxsplit=2) for line in lines[start + 1 : lines.index("", start)]]


def test_a_decoder_trained_under_autocast_holds_float32_alone(tmp_path):
    decoder, optimizer = decoder_and_optimizer()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = decoder(tokens()).float().square().mean()
    loss.backward()
    optimizer.step()
    lines = report(tmp_path, decoder, optimizer)
    n = len(list(decoder.parameters()))
    assert lines[0] == "unexpected types: none"
    assert counts(lines) == [
        ["parameters", "float32", str(n)],
        ["gradients", "float32", str(n)],
        ["optimizer state", "float32", str(2 * n)],
        ["step counters", "float32", str(n)],
    ]
    listed = rows(lines)
    assert len(listed) == 5 * n
    assert listed[0].split() == ["parameters", "float32", f"{VOCAB}x32", "embedding.weight"]
    assert [line.split()[-1] for line in listed[:n]] == [name for name, _ in decoder.named_parameters()]
    assert any(line.split() == ["step", "counters", "float32", "scalar", "norm.weight/step"] for line in listed)


def test_tensors_of_unexpected_dtype_come_first(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4).bfloat16())
    model[1].running_mean = model[1].running_mean.half()
    lines = report(tmp_path, model, torch.optim.AdamW(model.parameters()))
    assert lines[0] == "unexpected types: 3"
    assert [line.split() for line in lines[1:4]] == [
        ["parameters", "bfloat16", "4x4", "2.weight", "(expected", "float32)"],
        ["parameters", "bfloat16", "4", "2.bias", "(expected", "float32)"],
        [
            "buffers",
            "float16",
            "4",
            "1.running_mean",
            "(expected",
            "float32",
            "or",
            "int64",
            "or",
            "int32",
            "or",
            "bool)",
        ],
    ]
    assert lines[4] == ""
    assert len(rows(lines)) == 6 + 6 + 3  # also those that are as expected, and the gradients that are missing


def test_moments_and_gradients_in_a_small_type_are_unexpected(tmp_path):
    model = nn.Linear(4, 4, bias=False).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, torch.ones(1, 4, dtype=torch.bfloat16))
    lines = report(tmp_path, model, optimizer)
    assert lines[0] == "unexpected types: 4"
    names = ["weight", "weight", "weight/exp_avg", "weight/exp_avg_sq"]
    assert [line.split("  (")[0].split()[-1] for line in lines[1:5]] == names


def test_gradients_that_are_missing_are_counted_and_frozen_ones_are_not(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[2].weight.requires_grad_(False)
    model[0](torch.ones(2)).sum().backward()
    lines = report(tmp_path, model, torch.optim.AdamW(model.parameters()))
    assert ["gradients", "absent", "1"] in counts(lines)
    assert [line.split()[-1] for line in rows(lines) if "absent" in line] == ["1.weight"]


def test_two_reports_of_the_same_state_are_the_same(tmp_path):
    decoder, optimizer = decoder_and_optimizer()
    step(decoder, optimizer, tokens())
    assert report(tmp_path, decoder, optimizer) == report(tmp_path, decoder, optimizer)


@pytest.fixture
def group():
    """A process group that this test can ask for, as one rank of any number, of which only this one exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(size):
        if size == 1:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        return init_device_mesh("cpu", (size,))

    yield start
    dist.destroy_process_group()


def sharded_weight(mesh):
    return nn.Parameter(DTensor.from_local(torch.zeros(3, 4), mesh, [Shard(0)], run_check=False))


def test_sharded_tensors_show_their_own_shape_and_placement(tmp_path, group):
    weight = sharded_weight(group(2))
    write_dtypes_report(tmp_path, {"head.weight": weight}, {}, torch.optim.AdamW([weight]))
    line = rows((tmp_path / DTYPES_FILE).read_text().splitlines())[0]
    assert line.split() == ["parameters", "float32", "6x4", "(local", "3x4,", "Shard(dim=0))", "head.weight"]


def test_under_fsdp_with_small_types_the_master_copies_stay_float32(tmp_path, group):
    decoder, _ = decoder_and_optimizer()
    small = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, cast_forward_inputs=False)
    fully_shard(decoder, mesh=group(1), mp_policy=small)
    optimizer = torch.optim.AdamW(decoder.parameters(), fused=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = decoder(tokens()).float().square().mean()
    loss.backward()
    optimizer.step()
    lines = report(tmp_path, decoder, optimizer)
    assert lines[0] == "unexpected types: none"
    assert ["gradients", "float32", str(len(list(decoder.parameters())))] in counts(lines)
    assert "Shard(dim=0)" in rows(lines)[0]


# opt_state_mb.txt


def state_lines(folder):
    return (folder / OPTIMIZER_STATE_FILE).read_text().splitlines()


def test_the_optimizer_state_is_two_moments_and_the_counters(tmp_path):
    decoder, optimizer = decoder_and_optimizer()
    big = nn.Linear(1000, 1000, bias=False)
    optimizer.add_param_group({"params": [big.weight]})
    write_optimizer_state(tmp_path, [optimizer_line(optimizer, 0)])
    assert state_lines(tmp_path) == ["rank 0: 0.0 MB in 0 tensors"]
    big(torch.ones(1, 1000)).sum().backward()
    step(decoder, optimizer, tokens())
    floats = decoder.num_parameters() + 10**6
    moment = f"{4 * floats / 1e6:.1f}"
    count = len(list(decoder.parameters())) + 1
    write_optimizer_state(tmp_path, [optimizer_line(optimizer, 0)])
    assert state_lines(tmp_path) == [
        f"rank 0: {(8 * floats + 4 * count) / 1e6:.1f} MB in {3 * count} tensors "
        f"(exp_avg {moment}, exp_avg_sq {moment}, step 0.0)"
    ]
    assert float(moment) > 4.0


def test_of_sharded_state_only_the_own_shard_counts(tmp_path, group):
    local = torch.zeros(125_000, 2)
    weight = nn.Parameter(DTensor.from_local(local, group(2), [Shard(0)], run_check=False))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    write_optimizer_state(tmp_path, [optimizer_line(optimizer, 0)])
    assert state_lines(tmp_path) == ["rank 0: 2.0 MB in 3 tensors (exp_avg 1.0, exp_avg_sq 1.0, step 0.0)"]


def optimizer_of(floats):
    weight = nn.Parameter(torch.zeros(floats))
    weight.grad = torch.ones(floats)
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    optimizer.step()
    return optimizer


def line_of(rank, mb):
    return f"rank {rank}: {mb} MB in 1 tensors (momentum_buffer {mb})"


def test_a_rerun_with_fewer_ranks_leaves_no_line_of_the_one_before(tmp_path):
    for sizes in ([250_000, 250_000, 500_000], [500_000, 250_000]):
        write_optimizer_state(tmp_path, [optimizer_line(optimizer_of(size), n) for n, size in enumerate(sizes)])
        assert state_lines(tmp_path) == [line_of(n, f"{4e-6 * size:.1f}") for n, size in enumerate(sizes)]


def test_nowhere_to_write_is_an_error_that_the_monitor_counts(tmp_path):
    (tmp_path / "file").touch()
    optimizer = optimizer_of(10)
    with pytest.raises(OSError, match="Not a directory"):
        write_optimizer_state(tmp_path / "file", ["rank 0"])
    with pytest.raises(OSError, match="Not a directory"):
        write_dtypes_report(tmp_path / "file", {}, {}, optimizer)


def test_a_full_disk_is_an_error_that_the_monitor_counts(tmp_path):
    optimizer = optimizer_of(10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_optimizer_state(tmp_path, ["rank 0"])
        with pytest.raises(OSError, match="File too large"):
            write_dtypes_report(tmp_path, {}, {}, optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
