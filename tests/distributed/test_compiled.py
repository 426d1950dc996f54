"""torch.compile of every block, under every strategy and with checkpointing, gives the run that is not compiled."""

from collections import Counter
from functools import partial

import pytest
import torch

from nsa.config import parse_config
from nsa.nn.model import build_model
from nsa.ops import dispatch
from nsa.parallel import transform
from nsa.parallel.context import Context
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
