"""torch.compile of every block, under every strategy and with checkpointing, gives the run that is not compiled."""

import errno
import os
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch._inductor.config

from nsa.config import parse_config
from nsa.nn import loss as losses
from nsa.nn.model import build_model
from nsa.ops import dispatch
from nsa.parallel import compile_cache, transform
from nsa.parallel.context import Context
from nsa.parallel.numerics import numerics
from nsa.train import train
from tests.checkpoint.helpers import small
from tests.distributed.launching import ROOT
from tests.distributed.test_same_numbers import SHORT, assert_same, recompute, strategy, train_all, tree

COMPILED = {"runtime": {"compile": True}}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("how", "size"),
    [
        (strategy("single"), 1),
        (strategy("ddp"), 2),
        (strategy("fsdp"), 2),
        ({"parallel": {"strategy": "ddp", "context": 2}}, 2),
        ({"parallel": {"strategy": "fsdp", "context": 2}}, 2),
    ],
    ids=["single", "ddp", "fsdp", "context-ddp", "context-fsdp"],
)
def test_a_compiled_run_has_the_same_numbers(tmp_path, how, size):
    plain = {"name": "plain", "config": tree(SHORT, how)}
    compiled = {"name": "compiled", "config": tree(SHORT, how, COMPILED)}
    kept = ["block"] if "context" in how["parallel"] else ["selective", "block"]
    more = [{"name": name, "config": tree(SHORT, how, COMPILED, recompute(name))} for name in kept]
    train_all(tmp_path, size, [plain, compiled, *more])
    for name in ("compiled", *kept):
        assert_same(tmp_path / name, tmp_path / "plain", loss=1e-5, norm=1e-4)


@pytest.mark.parametrize("granularity", ["none", "block"])
def test_blocks_of_divided_sequences_are_compiled_in_two_parts_for_all_layers(monkeypatch, granularity):
    """And recompute the operators that they recompute without a compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    calls = Counter()
    choose = dispatch.choose

    def counted(operator, *args, count, **sizes):
        calls[operator] += count
        return choose(operator, *args, count=count, **sizes)

    monkeypatch.setattr(dispatch, "choose", counted)
    sizes = {"dim": 32, "n_layers": 10, "n_heads": 2, "n_kv_heads": 1, "head_dim_k": 16, "head_dim_v": 16}
    found, gradients = [], []
    for compiled in (True, False):
        config = parse_config({"model": sizes, "nsa": {"window": 20}}, "test")
        model = build_model(config, 64, 0)
        transform.divide_sequences(model, Context(None))
        transform.recompute(model, granularity)
        if compiled:
            transform.compile_blocks(model, inside_recompute=True)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        calls.clear()
        model(torch.arange(96)[None] % 64).square().sum().backward()
        found.append(dict(calls))
        gradients.append([p.grad for p in model.parameters()])
        frames = dict(torch._dynamo.utils.counters["frames"])
        assert frames == ({"total": 2, "ok": 2} if compiled else {})
    assert found[0] == found[1]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_the_loss_of_steps_and_of_validations_is_compiled(monkeypatch, no_cache_folder, tmp_path):
    """With a teacher, only that of validations is the cross-entropy."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    compiled = []
    monkeypatch.setattr(losses, "_compiled", lambda function: compiled.append(function.__name__) or function)
    settings = ("train.steps=2", "train.eval_every=2", "runtime.compile=true")
    train(small(*settings), tmp_path / "plain")
    assert set(compiled) == {"cross_entropy_sum"}
    steps = len(compiled)
    train(small(*settings, f"train.teacher={tmp_path / 'plain'}"), tmp_path / "taught")
    assert sorted(compiled[steps:]) == ["cross_entropy_sum"] * (steps - 2) + ["divergence_sum"] * 2


@pytest.fixture
def no_cache_folder(monkeypatch, tmp_path):
    """A user whose cache folder is empty. Afterwards, the variables that a run sets are unset again."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nsa" / "compiled"


# Without C++ kernels, which take a compiler a minute.
@torch._inductor.config.patch(fallback_by_default=True, selective_decompose=True)
def test_equal_layers_are_compiled_once_and_a_second_start_finds_them_in_the_cache(no_cache_folder):
    sizes = {"dim": 16, "n_layers": 4, "n_heads": 1, "n_kv_heads": 1, "head_dim_k": 16, "head_dim_v": 16, "mlp_dim": 16}
    config = parse_config({"model": {**sizes, "attention": "dense"}, **COMPILED}, "test")
    found = []
    for _ in range(2):
        torch._dynamo.utils.counters.clear()
        with numerics(config.runtime):
            model = transform.compile_blocks(build_model(config, 64, 0))
            model(torch.arange(32)[None]).square().sum().backward()
        counters = torch._dynamo.utils.counters
        compiled = {name: n for name, n in counters["inductor"].items() if name.startswith("fxgraph_cache")}
        found.append((counters["frames"]["total"], counters["aot_autograd"]["autograd_cache_hit"], compiled))
    assert found == [(1, 0, {"fxgraph_cache_miss": 2}), (1, 1, {"fxgraph_cache_hit": 2})]  # forward and backward
    assert any(no_cache_folder.rglob("*.py"))


def test_a_start_names_the_cache_folder_before_pytorch_chooses_one(no_cache_folder):
    """PyTorch does when its compiler is imported, as deterministic mode does."""
    script = (
        "import os, nsa.train; from nsa.config import load_config; from nsa.parallel.numerics import numerics\n"
        "assert 'TORCHINDUCTOR_CACHE_DIR' not in os.environ, 'by an import'\n"
        "config = load_config('m7c_125m', ['runtime.compile=true', 'runtime.deterministic=true'])\n"
        "with numerics(config.runtime): print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{no_cache_folder}\n", done.stderr


def test_the_compile_cache_drops_the_files_unused_for_longest(no_cache_folder, monkeypatch):
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 250)
    for name, used in (("a/old", 1), ("b/new", 3), ("b/recent", 2)):
        path = no_cache_folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100))
        os.utime(path, (used, used))
    compile_cache.use_compile_cache()
    assert sorted(path.name for path in no_cache_folder.rglob("*") if path.is_file()) == ["new", "recent"]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(no_cache_folder)
    assert os.environ["TRITON_CACHE_DIR"] == str(no_cache_folder / "triton"), "also for kernels of this package"


def test_the_compile_cache_drops_a_kernel_as_a_whole(no_cache_folder, monkeypatch):
    """Triton fails where it finds the description of a kernel without its code."""
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 250)
    for number, name in enumerate(("x/kernel.json", "y/kernel.json", "y/kernel.cubin", "x/kernel.cubin")):
        path = no_cache_folder / "triton" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100))
        os.utime(path, (number, number))
    compile_cache.use_compile_cache()
    assert {path.parent.name for path in no_cache_folder.rglob("kernel.*")} == {"x"}


def test_the_compile_cache_drops_what_a_power_failure_left_empty(no_cache_folder):
    """PyTorch keeps such a file, and every start of the configuration would fail."""
    long_ago, now = 1.0, time.time()
    for name, size, changed in (
        *(("a/graph.py", 0, long_ago), ("a/other.py", 9, now), ("b/graph.py", 9, long_ago)),
        *(("c/writing.py", 0, now), ("locks/graph.lock", 0, long_ago)),
    ):
        path = no_cache_folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
        os.utime(path, (changed, changed))
    compile_cache.use_compile_cache()
    left = sorted(str(path.relative_to(no_cache_folder)) for path in no_cache_folder.rglob("*.*"))
    assert left == ["b/graph.py", "c/writing.py", "locks/graph.lock"]


@pytest.mark.parametrize("fails", ["lstat", "unlink"])
def test_files_of_the_compile_cache_that_vanish_or_stay_do_not_stop_a_run(no_cache_folder, monkeypatch, fails):
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 50)
    no_cache_folder.mkdir(parents=True)
    (no_cache_folder / "file").write_bytes(bytes(100))
    real = getattr(Path, fails)

    def refuse(path, *arguments, **options):
        if path.name == "file":
            raise PermissionError(path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, fails, refuse)
    compile_cache.use_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(no_cache_folder)


@pytest.mark.parametrize("case", ["chosen by the user", "a file is in the way", "no room", "read-only"])
def test_the_compile_cache_stays_where_it_must(no_cache_folder, monkeypatch, case):
    if case == "chosen by the user":
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    elif case == "a file is in the way":
        no_cache_folder.parent.write_text("")
    else:
        number = errno.EDQUOT if case == "no room" else errno.EROFS
        monkeypatch.setattr(compile_cache, "TemporaryFile", Mock(side_effect=OSError(number, os.strerror(number))))
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    compile_cache.use_compile_cache()
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before
    assert "TRITON_CACHE_DIR" not in os.environ
    assert not list(no_cache_folder.rglob("*"))
