"""runtime.float8: what it refuses, which layers it converts, and that runs train and resume with it. A CPU emulates the
products, which a run refuses; so the tests that train take the refusal away."""

import sys
from functools import partial

import pytest
import torch

from nsa.config import parse_config
from nsa.errors import ConfigError
from nsa.nn.model import build_model
from nsa.nn.projection import project
from nsa.parallel import float8, transform
from nsa.train import train
from tests.checkpoint.helpers import assert_same_run, forget_generators, metrics_of, rows_of, small, train_until

RECIPES = ("tensorwise", "rowwise")
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def emulated(monkeypatch):
    pytest.importorskip("torchao", reason="torchao, of the extra float8, is not installed")
    monkeypatch.setattr(float8, "refusal", lambda *_: None)


def tiny(**model):
    sizes = {"dim": 32, "n_layers": 3, "n_heads": 2, "n_kv_heads": 1, "head_dim_k": 16, "head_dim_v": 16, "mlp_dim": 48}
    nsa = {"cmp_block": 4, "cmp_stride": 2, "sel_block": 4, "num_selected": 4, "window": 8}
    return build_model(parse_config({"model": {**sizes, **model}, "nsa": nsa}, "test"), 64, 0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_on_a_cpu_is_refused(recipe, tmp_path):
    with pytest.raises(ConfigError, match=rf"runtime\.float8: {recipe} needs a GPU .* on cpu; set it to none"):
        train(small(f"runtime.float8={recipe}"), tmp_path)


@pytest.mark.parametrize(("recipe", "card", "runs"), [("tensorwise", (8, 9), True), ("rowwise", (8, 9), False)])
def test_an_older_gpu_is_refused_with_what_it_has(recipe, card, runs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "L40S")
    said = None if runs else "rowwise needs compute capability 9.0, and L40S has 8.9"
    assert float8.refusal(recipe, GPU) == said


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(float8, "refusal", lambda *_: None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match=r"needs the package torchao.*\[float8\]"):
        float8.convert_to_float8(tiny(), "tensorwise", CPU)


@pytest.mark.parametrize(
    ("override", "said"),
    [("runtime.precision=fp16", "runtime.float8: needs bf16"), ("train.seq_len=40", "40 is not a multiple of 16")],
)
def test_a_configuration_that_cannot_multiply_in_fp8_is_refused(override, said):
    with pytest.raises(ConfigError, match=said):
        small("runtime.float8=rowwise", override)


def test_head_gates_compressors_and_index_stay_in_high_precision(emulated):
    converted = {}
    for kind in ("nsa", "msa"):
        model = tiny(attention=kind, n_layers=1)
        before = dict(model.state_dict())
        float8.convert_to_float8(model, "tensorwise", CPU)
        assert {name: id(p) for name, p in model.state_dict(keep_vars=True).items()}.keys() == before.keys()
        assert all(type(p) is torch.nn.Parameter and p.dtype == torch.float32 for p in model.parameters())
        linears = [(name, type(m)) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
        converted[kind] = [name.removeprefix("blocks.0.") for name, found in linears if found is not torch.nn.Linear]
    mlp = ["mlp.gate", "mlp.up", "mlp.out"]
    pairs = [f"attention.{part}.{i}" for part in "kv" for i in range(3)]
    assert converted == {
        "nsa": ["attention.q", *pairs, "attention.out", *mlp],
        "msa": [*(f"attention.{part}" for part in ("q", "k", "v", "out")), *mlp],
    }


def test_layers_of_other_sizes_stay_as_they_are_and_are_named(emulated):
    model = float8.convert_to_float8(tiny(attention="dense", mlp_dim=40), "rowwise", CPU)
    said = "12 linear layers multiply in FP8, 9 do not, since a size is not a multiple of 16: mlp.gate, mlp.up, mlp.out"
    assert float8.describe_float8(model) == said


def test_layers_of_one_input_are_one_product_with_the_bits_of_separate_calls(emulated, monkeypatch):
    mlp = float8.convert_to_float8(tiny(attention="dense"), "rowwise", CPU).blocks[0].mlp  # a scale of each row
    x, calls, forward = torch.randn(1, 80, 32), [], type(mlp.gate).forward
    monkeypatch.setattr(type(mlp.gate), "forward", lambda *args: calls.append(args) or forward(*args))
    joined = project(x, [mlp.gate, mlp.up])
    assert len(calls) == 1
    for got, layer in zip(joined, (mlp.gate, mlp.up), strict=True):
        assert torch.equal(got, layer(x))


# The bounds are twice the rounding error of the type that gradients have in the products: e5m2 and e4m3.
@pytest.mark.parametrize(
    ("recipe", "granularity", "bound"), [("tensorwise", "none", 0.25), ("rowwise", "block", 0.125)]
)
def test_compiled_and_recomputed_layers_have_the_gradients_of_the_plain_ones(
    emulated, monkeypatch, recipe, granularity, bound
):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    found = []
    for how in ("plain", "float8", "compiled"):
        model = tiny(attention="dense")
        if how != "plain":
            float8.convert_to_float8(model, recipe, CPU)
            transform.recompute(model, granularity, compiled=how == "compiled")
        if how == "compiled":
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            transform.compile_blocks(model)
        model(torch.arange(96)[None] % 64).square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # for all layers
    plain, eager, compiled = found
    torch.testing.assert_close(compiled, eager)
    assert 0.001 < (eager - plain).norm() / plain.norm() < bound


@pytest.mark.parametrize("options", [["runtime.float8=tensorwise"], ["runtime.float8=rowwise", "model.attention=msa"]])
def test_a_run_in_float8_resumes_to_the_same_bits(emulated, tmp_path, options):
    options += ["train.seq_len=64", "runtime.gradient_checkpointing=block"]
    train(small(*options), tmp_path / "whole")
    train_until(3, tmp_path / "resumed", *options)
    forget_generators()
    train(small(*options), tmp_path / "resumed")
    assert_same_run(tmp_path / "resumed", tmp_path / "whole")


@pytest.mark.parametrize("first", ["none", "rowwise"])
def test_a_run_may_turn_float8_on_and_off(emulated, tmp_path, first):
    then = "rowwise" if first == "none" else "none"
    train_until(3, tmp_path, f"runtime.float8={first}")
    train(small(f"runtime.float8={then}"), tmp_path, accept_changes=True)
    assert [row["step"] for row in rows_of(tmp_path)] == [str(step) for step in range(1, 7)]


def test_fsdp_trains_in_float8_as_one_process(emulated, tmp_path):
    for strategy in ("single", "fsdp"):
        train(small("runtime.float8=rowwise", "train.steps=2", f"parallel.strategy={strategy}"), tmp_path / strategy)
    for row, want in zip(rows_of(tmp_path / "fsdp"), rows_of(tmp_path / "single"), strict=True):
        assert metrics_of(tmp_path / "fsdp")["strategy"] == "fsdp"
        assert float(row["loss"]) == pytest.approx(float(want["loss"]), rel=1e-5)
