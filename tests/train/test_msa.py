"""Training with MSA: the index learns from its own loss alone, however a step is divided, and the record shows it."""

import csv
import json
from contextlib import contextmanager

import pytest
import torch

import nsa.train.loop
from nsa.checkpoint.format import BEST, FOLDER, read_pointer
from nsa.config import parse_config
from nsa.data.loader import Batch
from nsa.data.sequences import IGNORED
from nsa.data.tokenizers import ByteTokenizer
from nsa.errors import ArgumentError
from nsa.nn import MSAAttention
from nsa.nn.attention import DenseAttention, attention_layers
from nsa.ops import MSASpec
from nsa.parallel.numerics import numerics
from nsa.run_folder import LAYER_SELECTION, read_rows
from nsa.train import train
from nsa.train.monitor import Monitor
from nsa.train.state import build_state
from nsa.train.step import train_step
from tests.distributed.launching import TINY, rows_of, run_ranks, write_config

SEQ_LEN, BATCH = 64, 4
MSA = {
    "model": {"attention": "msa"},
    "msa": {"block": 16, "num_selected": 2},
    "train": {"seq_len": SEQ_LEN, "batch_size": BATCH, "steps": 6},
}


def configured(**changes):
    sections = {name: {**TINY.get(name, {}), **MSA.get(name, {}), **changes.get(name, {})} for name in {*TINY, *MSA}}
    return parse_config(sections, "test")


def built(**changes):
    return build_state(configured(**changes), ByteTokenizer())


def some_batch(seed=0):
    """Packed documents of unequal lengths, some of which are too short to choose; some tokens have no target."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (1, BATCH * SEQ_LEN + 1), generator=draw)
    targets = tokens[:, 1:].clone()
    targets[:, 50:60] = IGNORED
    borders = torch.tensor([0, 64, 80, 128, 192, 230, 256], dtype=torch.int32)
    return Batch(tokens[:, :-1].contiguous(), targets, borders, SEQ_LEN)


def rows_apart(batch):
    """The batch as four micro-batches of one row."""
    for row in range(BATCH):
        tokens = slice(row * SEQ_LEN, (row + 1) * SEQ_LEN)
        borders = (batch.cu_seqlens.clamp(row * SEQ_LEN, (row + 1) * SEQ_LEN) - row * SEQ_LEN).unique().int()
        yield Batch(batch.inputs[:, tokens], batch.targets[:, tokens], borders, SEQ_LEN)


def steps_of(state, parts=lambda batch: [batch], steps=3):
    results = []
    with numerics(state.config.runtime):
        for number in range(steps):
            batch = some_batch(number)
            targets = int((batch.targets != IGNORED).sum())
            results.append(train_step(state, iter(parts(batch)), targets, lr=1e-2))
    return results


def numbers(results):
    return [(r.loss, r.grad_norm, r.index_kl) for r in results]


def test_micro_batches_give_the_same_index_loss_and_gradients():
    whole, parts = steps_of(built()), steps_of(built(), rows_apart)
    for a, b in zip(numbers(whole), numbers(parts), strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_the_index_loss_is_the_mean_over_queries_groups_and_layers():
    state, batch = built(), some_batch()
    total = queries = 0.0
    with torch.no_grad():
        x = state.model.embedding(batch.inputs)
        for block in state.model.blocks:
            options = {"cu_seqlens": batch.cu_seqlens, "max_seqlen": SEQ_LEN, "counted": batch.targets != IGNORED}
            _, kl, queries = block.attention(block.attention_norm(x), **options)
            total += kl
            x = block(x, batch.cu_seqlens, SEQ_LEN)
    # Documents of 64, 16, 48, 64, 38 and 26 tokens; queries from the 33rd token on choose; 50 to 59 have no target.
    assert int(queries) == 32 + 16 + 32 + 6 - 10
    result = steps_of(state, steps=1)[0]
    assert result.index_kl == pytest.approx(float(total) / (2 * 2 * int(queries)), rel=1e-5)


def test_the_gradient_of_the_index_is_that_of_its_mean_loss():
    """The step scales it after backward; here it is computed from the mean itself."""
    state, batch = built(msa={"loss_weight": 3.0}, train={"grad_clip": 0.0}), some_batch()
    counted = batch.targets != IGNORED
    _, kl, queries = state.model(
        batch.inputs, batch.cu_seqlens, SEQ_LEN, loss=lambda hidden, head: head(hidden).sum(), counted=counted
    )
    (3.0 * kl / (4 * queries)).backward()
    wanted = {name: p.grad.clone() for name, p in state.parameters.items() if p.grad.any()}
    assert wanted
    assert all("index" in name for name in wanted)
    steps_of(state, steps=1)
    for name, gradient in wanted.items():
        torch.testing.assert_close(state.parameters[name].grad, gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("granularity", ["selective", "block", "branch"])
def test_recomputation_changes_no_bit(granularity):
    kept, again = built(), built(runtime={"gradient_checkpointing": granularity})
    assert numbers(steps_of(again)) == numbers(steps_of(kept))


@pytest.mark.parametrize(
    ("section", "changes"),
    [("train", {"optimizer": "muon"}), pytest.param("runtime", {"compile": True}, marks=pytest.mark.long)],
)
def test_muon_and_compiled_blocks_train_it(section, changes):
    results = steps_of(built(**{section: changes}))
    assert all(r.updated and r.index_kl > 0 for r in results)
    if section == "runtime":
        for a, b in zip(numbers(results), numbers(steps_of(built())), strict=True):
            assert a == pytest.approx(b, rel=1e-4)


def test_the_warm_up_reads_all_tokens_and_ends_at_its_step():
    state = built(msa={"warmup_steps": 2})
    (_, layer), *_ = attention_layers(state.model)
    said = [layer.start_step(step) for step in (1, 2, 3, 4)]
    assert said == [
        "dense attention until step 2, while the index warms up", None, "sparse attention from step 3 on", None
    ]  # fmt: skip
    assert not layer.is_dense
    (_, resumed), *_ = attention_layers(built(msa={"warmup_steps": 2}).model)
    assert [resumed.start_step(step) for step in (3, 4)] == ["sparse attention from step 3 on", None]
    for sections in ({"train": {"seq_len": 32}}, {"train": {"freeze": ["*index_*"]}}):
        (_, frozen), *_ = attention_layers(built(msa={"warmup_steps": 2}, **sections).model)
        assert [frozen.start_step(step) for step in (1, 2, 3)] == [None] * 3, "nothing warms up"


def test_the_index_loss_moves_no_other_parameter_through_clipping():
    small, large = (built(msa={"loss_weight": weight}, train={"grad_clip": 0.1}) for weight in (1.0, 100.0))
    for _, layer in (*attention_layers(small.model), *attention_layers(large.model)):
        layer.is_dense = True  # another index would choose other blocks
    results = steps_of(small), steps_of(large)
    assert results[1][0].grad_norm > 2 * results[0][0].grad_norm > 0.2, "the logged norm has all gradients"
    for name, parameter in small.parameters.items():
        assert torch.equal(parameter, large.parameters[name]) or "index" in name, name


def test_the_first_steps_of_each_kind_of_attention_may_take_as_long_as_compiling(tmp_path, monkeypatch):
    extended, active, seen = Monitor.extended_timeout, [], []

    @contextmanager
    def recorded(monitor):
        active.append(True)
        with extended(monitor):
            yield
        active.pop()

    monkeypatch.setattr(Monitor, "extended_timeout", recorded)
    monkeypatch.setattr(nsa.train.loop, "train_step", lambda *a, **o: seen.append(bool(active)) or train_step(*a, **o))
    train(configured(msa={"warmup_steps": 2}, train={"steps": 4, "eval_every": 0}), tmp_path)
    assert seen == [True, False, True, False]


def test_the_best_checkpoint_is_not_one_of_the_warm_up(tmp_path):
    """Its loss is that of dense attention, and whoever loads it computes sparse attention."""
    config = configured(msa={"warmup_steps": 4}, train={"eval_every": 1}, checkpoint={"keep": 9})
    train(config, tmp_path)
    assert read_pointer(tmp_path / FOLDER, BEST) in ("step_00000005", "step_00000006")
    losses = [float(row["val_loss"]) for row in rows_of(tmp_path)]
    assert json.loads((tmp_path / "metrics.json").read_text())["best_val_loss"] == min(losses[4:])


def test_a_frozen_index_of_one_layer_leaves_the_statistics_of_the_others(tmp_path):
    config = configured(
        model={"n_layers": 2}, train={"freeze": ["blocks.0.*index_*"], "steps": 2}, telemetry={"every": 1}
    )
    train(config, tmp_path)
    found = {(row["layer"], bool(row["mass"])) for row in read_rows(tmp_path, LAYER_SELECTION)}
    assert found == {("blocks.0.attention", False), ("blocks.1.attention", True)}


def test_a_run_of_short_sequences_trains_no_index_and_says_so(tmp_path):
    file = write_config(tmp_path, **{**MSA, "train": {"seq_len": 32, "steps": 2, "eval_every": 0}})
    (ended,) = run_ranks(1, "train", file, f"train.out_dir={tmp_path / 'run'}")
    assert ended.code == 0, ended.output
    assert "index   not trained: no sequence exceeds 32 tokens" in ended.output
    assert [row["index_kl"] for row in rows_of(tmp_path / "run")] == ["", ""]


def test_the_record_has_the_index_loss_and_the_end_of_the_warm_up(tmp_path):
    sections = {**MSA, "msa": {**MSA["msa"], "warmup_steps": 2}, "train": {**MSA["train"], "steps": 3}}
    (ended,) = run_ranks(1, "train", write_config(tmp_path, **sections), f"train.out_dir={tmp_path / 'run'}")
    assert ended.code == 0, ended.output
    assert "step 0003 | sparse attention from step 3 on" in ended.output
    with (tmp_path / "run" / "training.csv").open() as file:
        assert all(float(row["index_kl"]) > 0 for row in csv.DictReader(file))
    events = [json.loads(line) for line in (tmp_path / "run" / "heartbeat_rank0.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "attention"] == [1, 3]


def test_the_layer_is_dense_attention_up_to_the_tokens_that_it_reads():
    torch.manual_seed(0)
    sizes = (32, 4, 2, 16, 32)
    layer = MSAAttention(*sizes, MSASpec(16, 3), index_dim=64, qk_norm=True).double()
    dense = DenseAttention(*sizes, qk_norm=True).double()
    dense.load_state_dict({name: x for name, x in layer.state_dict().items() if "index" not in name})
    x = torch.randn(2, 49, 32, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[:, :48], dense(x)[:, :48])
    torch.testing.assert_close(layer(x[:, :48]), dense(x[:, :48]))
    assert not torch.allclose(layer(torch.cat([x, x], dim=1)), dense(torch.cat([x, x], dim=1)))


def test_no_gradient_of_the_index_loss_reaches_another_parameter_or_the_input():
    layer = MSAAttention(32, 4, 2, 16, None, MSASpec(16, 1, 0), qkv_bias=True).double()
    x = torch.randn(1, 50, 32, dtype=torch.float64, requires_grad=True)
    y, kl, queries = layer(x, counted=torch.ones(1, 50, dtype=torch.bool))
    assert int(queries) == 34
    kl.backward(retain_graph=True)
    trained = {name for name, p in layer.named_parameters() if p.grad is not None}
    assert trained == {"index_q.weight", "index_q.bias", "index_k.weight", "index_k.bias"}
    assert x.grad is None
    layer.zero_grad()
    y.sum().backward()
    assert trained.isdisjoint(name for name, p in layer.named_parameters() if p.grad is not None)


def test_tokens_that_are_not_two_chunks_are_refused_with_the_index_loss_too():
    layer = MSAAttention(32, 4, 2, 16, None, MSASpec(16, 1, 0))
    layer.context = object()  # the check comes before any exchange
    for options in ({}, {"counted": torch.ones(1, 51, dtype=torch.bool)}):
        with pytest.raises(ArgumentError, match="two chunks of equal length, got 51"):
            layer(torch.zeros(1, 51, 32), **options)
