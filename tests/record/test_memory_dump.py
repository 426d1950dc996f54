"""Memory dumps and the report of a run that ran out of memory: sums that agree with sums by hand, and no exception."""

import json
import mmap
import resource
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from nsa.config import parse_config
from nsa.nn.model import build_model
from nsa.record.memory_dump import (
    dump_memory,
    format_bytes,
    is_out_of_memory,
    list_tensors,
    memory_usage,
    oom_report,
    remedies,
    run_tensors,
)

CPU = torch.device("cpu")
MODEL = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim_k": 16, "head_dim_v": 16}
NSA = {"cmp_block": 4, "cmp_stride": 2, "sel_block": 4, "num_selected": 3, "num_init": 1, "num_local": 1, "window": 5}
VOCAB = 64


def trained_decoder(**model):
    """A small decoder after one step: weights, gradients and both moments are there."""
    config = parse_config({"model": {**MODEL, **model}, "nsa": NSA}, "test")
    decoder = build_model(config, VOCAB, seed=0)
    optimizer = torch.optim.AdamW(decoder.parameters(), fused=True)
    decoder(torch.randint(0, VOCAB, (1, 16))).square().mean().backward()
    optimizer.step()
    return decoder, optimizer


def named(model, optimizer):
    return lambda: run_tensors(dict(model.named_parameters()), dict(model.named_buffers()), optimizer)


def dumped(folder, model, optimizer, label="step1", rank=0):
    dump_memory(folder, label, CPU, rank, named(model, optimizer))
    stem = f"mem_{label}" + (f"_rank{rank}" if rank else "")
    return json.loads((folder / f"{stem}.json").read_text()), (folder / f"{stem}.txt").read_text()


@pytest.mark.parametrize("tied", [False, True])
def test_owners_of_a_trained_decoder_are_the_sums_by_hand(tmp_path, tied):
    decoder, optimizer = trained_decoder(tied_head=tied)
    snapshot, _ = dumped(tmp_path, decoder, optimizer)
    floats = decoder.num_parameters()
    count = len(list(decoder.parameters()))
    assert count == len(list(decoder.named_parameters(remove_duplicate=False))) - tied
    owners = snapshot["owners"]
    assert {kind: entry["bytes"] for kind, entry in owners.items()} == {
        "parameters": 4 * floats,
        "gradients": 4 * floats,
        "optimizer state": 2 * 4 * floats + 4 * count,  # two moments, and a step counter a parameter
        "buffers": 0,
    }
    assert [entry["tensors"] for entry in owners.values()] == [count, count, 3 * count, 0]
    modules = {"embedding": 4 * VOCAB * 32, "blocks": 4 * sum(p.numel() for p in decoder.blocks.parameters())}
    modules |= {"norm": 4 * 32} | ({} if tied else {"head": 4 * VOCAB * 32})
    assert owners["parameters"]["modules"] == owners["gradients"]["modules"] == modules
    assert owners["optimizer state"]["modules"]["norm"] == 2 * modules["norm"] + 4


def test_a_weight_with_two_names_counts_once():
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    pair = nn.ModuleList([first, second])
    both = dict(pair.named_parameters(remove_duplicate=False))
    assert len(both) == 2
    first(torch.ones(8)).sum().backward()
    held = list_tensors(run_tensors(both, {}, torch.optim.SGD(pair.parameters())), CPU)
    expected = [("parameters", "0.weight", 256), ("gradients", "0.weight", 256)]
    assert [(tensor["kind"], tensor["name"], tensor["bytes"]) for tensor in held] == expected


def test_gradients_that_are_pieces_of_one_bucket_count_each():
    bucket = torch.zeros(100)
    pieces = [("gradients/a", bucket[:60]), ("gradients/b", bucket[60:])]
    assert [tensor["bytes"] for tensor in list_tensors(pieces, CPU)] == [240, 160]


def test_an_expanded_tensor_counts_the_bytes_of_its_storage():
    assert list_tensors([("buffers/mask", torch.zeros(1).expand(1000))], CPU)[0]["bytes"] == 4


def test_the_largest_tensors_come_first_with_name_shape_and_type(tmp_path):
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), *(nn.Linear(8, 8) for _ in range(20)))
    snapshot, text = dumped(tmp_path, model, torch.optim.SGD(model.parameters()), "boot")
    largest = snapshot["largest_tensors"]
    assert len(largest) == 20
    first = {"kind": "parameters", "name": "0.weight", "shape": [8, 64], "dtype": "float32", "bytes": 2048}
    assert largest[0] == first
    assert [tensor["bytes"] for tensor in largest[1:]] == [256] * 19
    # Two vectors of 8 floats, and a count of batches in int64.
    assert snapshot["owners"]["buffers"] == {"bytes": 2 * 32 + 8, "tensors": 3, "modules": {"1": 72}}
    assert "parameters 0.weight" in text


def test_the_snapshot_has_time_place_and_amounts(tmp_path):
    decoder, optimizer = trained_decoder()
    before = time.time()
    snapshot, text = dumped(tmp_path, decoder, optimizer, "step7")
    assert before <= snapshot["time"] <= time.time()
    assert (snapshot["rank"], snapshot["label"], snapshot["device"]) == (0, "step7", "cpu")
    assert 10**7 < snapshot["resident_bytes"] <= snapshot["peak_bytes"]
    accounted = sum(entry["bytes"] for entry in snapshot["owners"].values())
    assert snapshot["unaccounted_bytes"] == snapshot["resident_bytes"] - accounted
    for words in ("rank 0 at step7", "resident", "peak", "optimizer state", "blocks", "embedding"):
        assert words in text


def test_ranks_above_zero_write_under_their_own_names(tmp_path):
    model = nn.Linear(2, 2)
    for rank in (0, 3):
        dumped(tmp_path, model, torch.optim.SGD(model.parameters()), "boot", rank)
    names = {"mem_boot.json", "mem_boot.txt", "mem_boot_rank3.json", "mem_boot_rank3.txt"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_the_peak_includes_freed_memory():
    before = memory_usage(CPU)["resident_bytes"]
    # Pages of its own: what malloc hands out may be memory that earlier tests freed and that is still resident.
    with mmap.mmap(-1, 64 * 2**20) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    # The kernel keeps its counts a little late.
    assert memory_usage(CPU)["peak_bytes"] > before + 60 * 2**20


def test_without_proc_the_peak_is_the_resident_size(tmp_path, monkeypatch):
    monkeypatch.setattr("nsa.record.memory_dump.Path", lambda _: tmp_path / "absent")
    usage = memory_usage(CPU)
    assert usage["peak_bytes"] == usage["resident_bytes"] > 0


def test_an_unwritable_folder_fails_a_dump_but_not_a_report(tmp_path):
    model = nn.Linear(2, 2)
    tensors = named(model, torch.optim.SGD(model.parameters()))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        dump_memory(tmp_path / "file", "boot", CPU, 0, tensors)
    assert "out of memory on rank 0" in oom_report(tmp_path / "file", 0, CPU, MemoryError(), tensors)


def test_a_full_disk_leaves_no_partial_file_and_does_not_fail_a_report(tmp_path):
    model = nn.Linear(2, 2)
    tensors = named(model, torch.optim.SGD(model.parameters()))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            dump_memory(tmp_path, "boot", CPU, 0, tensors)
        line = oom_report(tmp_path, 0, CPU, MemoryError(), tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "out of memory on rank 0" in line
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_cannot_be_listed_do_not_fail_a_report(tmp_path):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    line = oom_report(tmp_path, 2, CPU, MemoryError("no room\nfor two lines"), broken, ["train.micro_batch=1"])
    assert line == "out of memory on rank 2: no room; try train.micro_batch=1"


def test_a_dump_of_the_125m_model_takes_less_than_50_ms_of_cpu_time(tmp_path):
    config = parse_config({}, "test")
    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in build_model(config, 50257, seed=0).parameters()]
    assert len(shapes) > 150
    # The same number of tensors and not their size: nothing but names, shapes and addresses is looked at.
    parameters = {f"blocks.{i}.weight": nn.Parameter(torch.zeros(2, 2)) for i in range(len(shapes))}
    optimizer = torch.optim.AdamW(parameters.values())
    sum(p.sum() for p in parameters.values()).backward()
    optimizer.step()
    tensors = lambda: run_tensors(parameters, {}, optimizer)  # noqa: E731
    took = []
    for _ in range(5):
        began = time.thread_time()  # CPU time: what else the machine does is not its cost
        dump_memory(tmp_path, "step1", CPU, 0, tensors)
        took.append(time.thread_time() - began)
    assert min(took) < 0.05


@pytest.fixture
def half_of_two_ranks():
    """Rank 0 of a group of two whose other rank does not exist: enough for whatever does not communicate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def test_of_sharded_tensors_only_the_own_shard_counts(tmp_path, half_of_two_ranks):
    weight = nn.Parameter(DTensor.from_local(torch.zeros(3, 4), half_of_two_ranks, [Shard(0)], run_check=False))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    assert weight.shape == (6, 4)
    dump_memory(tmp_path, "step1", CPU, 0, lambda: run_tensors({"head.weight": weight}, {}, optimizer))
    snapshot = json.loads((tmp_path / "mem_step1.json").read_text())
    held = {kind: entry["bytes"] for kind, entry in snapshot["owners"].items()}
    assert held == {"parameters": 48, "gradients": 48, "optimizer state": 48 + 48 + 4, "buffers": 0}
    first = snapshot["largest_tensors"][0]
    assert (first["shape"], first["local_shape"], first["bytes"]) == ([6, 4], [3, 4], 48)


def real_host_error():
    try:
        torch.empty(10**15)
    except RuntimeError as error:
        return error


def wrapped(cause):
    error = ValueError("a step failed")
    error.__cause__ = cause
    return error


def test_running_out_of_memory_is_distinguished_from_other_errors():
    for error in (
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.OutOfMemoryError("x"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        real_host_error(),
        MemoryError(),
    ):
        assert is_out_of_memory(error), error
        assert is_out_of_memory(wrapped(error)), error
    circle = ValueError("its own cause")
    circle.__cause__ = circle
    for error in (
        RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 232448"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        OSError(28, "No space left on device"),
        ValueError("DefaultCPUAllocator: can't allocate memory"),
        KeyboardInterrupt(),
        circle,
    ):
        assert not is_out_of_memory(error), error


def test_the_line_names_the_largest_owners_and_remedies(tmp_path):
    decoder, optimizer = trained_decoder()
    advice = ["train.micro_batch=8", "runtime.gradient_checkpointing=block"]
    line = oom_report(tmp_path, 1, CPU, real_host_error(), named(decoder, optimizer), advice)
    report = json.loads((tmp_path / "oom_rank1.json").read_text())
    assert "\n" not in line
    assert line.startswith(f"out of memory on rank 1: {format_bytes(report['in_use_bytes'])} of ")
    assert "in use and 3.6 PiB more requested; largest: activations and others " in line
    floats, count = decoder.num_parameters(), len(list(decoder.parameters()))
    for kind, held in (("optimizer state", 8 * floats + 4 * count), ("parameters", 4 * floats)):
        assert f"{kind} {format_bytes(held)}" in line
        assert report["owners"][kind]["bytes"] == held
    assert line.index("optimizer state") < line.index("parameters")
    assert line.endswith("; try train.micro_batch=8, runtime.gradient_checkpointing=block")
    assert report["requested_bytes"] == 4 * 10**15
    held = sum(entry["bytes"] for entry in report["owners"].values())
    assert held + report["unaccounted_bytes"] == report["resident_bytes"] == report["in_use_bytes"]
    assert report["owners"]["parameters"]["modules"]["blocks"] == 4 * sum(
        p.numel() for p in decoder.blocks.parameters()
    )


def test_a_host_that_is_full_is_not_blamed_on_the_gpu(tmp_path):
    model = nn.Linear(2, 2)
    tensors = named(model, torch.optim.SGD(model.parameters()))
    line = oom_report(tmp_path, 0, torch.device("cuda"), MemoryError(), tensors, ["train.micro_batch=8"])
    assert "train.micro_batch" not in line
    assert "data.workers" in line
    assert "checkpoint.background" not in line, "each save copies the state to the host"
    assert json.loads((tmp_path / "oom_rank0.json").read_text())["device"] == "cpu"


@pytest.mark.parametrize(
    ("overrides", "micro_batch", "world", "strategy", "advice"),
    [
        ([], 16, 1, "single", ["train.micro_batch=8", "runtime.gradient_checkpointing=block"]),
        ([], 15, 1, "single", ["train.micro_batch=5", "runtime.gradient_checkpointing=block"]),
        (["runtime.gradient_checkpointing=branch"], 2, 1, "single", ["train.micro_batch=1"]),
        (["runtime.gradient_checkpointing=block"], 1, 2, "ddp", ["parallel.strategy=fsdp"]),
        (["parallel.ddp.static_graph=true"], 8, 2, "fsdp", ["runtime.gradient_checkpointing=block"]),
        (["runtime.gradient_checkpointing=block"], 1, 1, "single", ["a shorter train.seq_len", "a smaller model"]),
    ],
)
def test_only_settings_that_can_still_be_changed_are_proposed(overrides, micro_batch, world, strategy, advice):
    assert remedies(parse_config({}, "test", overrides), micro_batch, world, strategy) == advice


def test_sizes_have_a_unit_that_people_read():
    formatted = {0: "0 bytes", 1023: "1023 bytes", 1024: "1.0 KiB", 3 * 2**20: "3.0 MiB", 41_768_607_949: "38.9 GiB"}
    assert {count: format_bytes(count) for count in formatted} == formatted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_allocated_bytes_equal_the_tensors(tmp_path):
    device = torch.device("cuda", 0)
    before = memory_usage(device)["allocated_bytes"]
    model = nn.Linear(1024, 1024, bias=False, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    dump_memory(tmp_path, "step1", device, 0, named(model, optimizer))
    snapshot = json.loads((tmp_path / "mem_step1.json").read_text())
    weight = 4 * 2**20
    held = {kind: entry["bytes"] for kind, entry in snapshot["owners"].items()}
    assert held == {"parameters": weight, "gradients": weight, "optimizer state": 2 * weight + 4, "buffers": 0}
    # The allocator rounds the step counter up.
    assert 0 <= snapshot["allocated_bytes"] - before - 4 * weight <= 4096
    assert snapshot["peak_bytes"] >= snapshot["allocated_bytes"]
    assert snapshot["reserved_bytes"] >= snapshot["allocated_bytes"]
    assert "PyTorch CUDA memory summary" in (tmp_path / "mem_step1.txt").read_text()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_full_gpu_names_the_largest_tensors(tmp_path):
    device = torch.device("cuda", 0)
    model = nn.Linear(1024, 1024, bias=False, device=device)
    optimizer = torch.optim.SGD(model.parameters())
    activations = torch.ones(64 * 2**20, dtype=torch.uint8, device=device)
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device=device)
    assert is_out_of_memory(caught.value)
    line = oom_report(tmp_path, 0, device, caught.value, named(model, optimizer))
    report = json.loads((tmp_path / "oom_rank0.json").read_text())
    assert report["requested_bytes"] == 2**50
    assert "1.0 PiB more requested" in line
    assert "parameters 4.0 MiB" in line
    assert report["unaccounted_bytes"] >= activations.nbytes
    assert report["total_bytes"] == torch.cuda.get_device_properties(device).total_memory
    assert report["allocated_bytes"] <= report["in_use_bytes"] <= report["total_bytes"]
    largest = report["largest_tensors"][0]
    assert (largest["kind"], largest["name"], largest["bytes"]) == ("parameters", "weight", 4 * 2**20)
    assert report["allocator"]["reserved_bytes.all.current"] == report["reserved_bytes"]
