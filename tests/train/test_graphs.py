"""CUDA graphs of the training step: the same numbers as without them, and a reason where they are not used.

Without a GPU a stand-in runs the pass at every replay, on the graph's buffers and into its gradients.
"""

import json
import math

import pytest
import torch

from nsa import faults
from nsa.data.loader import Batch
from nsa.errors import ConfigError
from nsa.parallel.world import World
from nsa.train import loop, train
from nsa.train.graphs import StepGraphs, memory_refusal, plan_graphs
from nsa.train.step import train_step
from tests.train.test_training import TOKENS, machine_free, rows_of, setup, tiny

CUDA = World(torch.device("cuda"))


class Replays(StepGraphs):
    """Captures nothing: a replay runs the pass. `replays` counts them."""

    replays = 0

    def _warm_up(self, work, parameters):
        self._losses = torch.zeros_like(work(self._batch, self._divisor, self._scale))
        for parameter in parameters:
            parameter.grad = None
        self._parameters = parameters

    def _capture(self, work, pool):
        adds = bool(self._graphs)
        loss = self._losses.clone()
        if not adds:  # gradients in the memory of the graph
            for parameter in self._parameters:
                parameter.grad = torch.full_like(parameter, math.nan)
        outer, gradients = self, [parameter.grad for parameter in self._parameters]

        class Graph:
            def replay(self):
                outer.replays += 1
                for parameter, gradient in zip(outer._parameters, gradients, strict=True):
                    parameter.grad = gradient if adds else gradient.zero_()
                loss.copy_(work(outer._batch, outer._divisor, outer._scale))

        return Graph(), loss


@pytest.fixture(autouse=True)
def _no_pool(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


def batches_of(data, step, graphs, micro_batch):
    return [data.train.batch(4 * step + i, micro_batch).padded(graphs.borders) for i in range(0, 4, micro_batch)]


@pytest.mark.parametrize("micro_batch", [4, 2])
@pytest.mark.parametrize("isolated", ["true", "false"], ids=["packed", "plain"])
def test_replayed_steps_give_the_numbers_of_plain_ones(micro_batch, isolated):
    override = f"data.isolate_documents={isolated}"
    _, data, plain = setup(override)
    _, _, state = setup(override)
    state.graphs = Replays(micro_batch * 32, accumulates=micro_batch < 4)
    for step in range(4):
        batches = batches_of(data, step, state.graphs, micro_batch)
        expected = train_step(plain, iter(batches), TOKENS, lr=1e-2)
        assert train_step(state, iter(batches), TOKENS, lr=1e-2) == expected
    assert state.graphs.replays == 4 * (4 // micro_batch)
    for name, parameter in plain.parameters.items():
        assert torch.equal(parameter, state.parameters[name]), name


def test_graphs_are_captured_again_when_the_warm_up_of_an_index_ends(tmp_path, monkeypatch):
    made = []

    def plan(config, world, micro_batch):
        made.append(Replays(micro_batch * 32, accumulates=False))
        return made[-1]

    sections = ["model.attention=msa", "msa.block=16", "msa.num_selected=1", "msa.num_local=0", "msa.warmup_steps=2"]
    train(tiny(*sections), tmp_path / "plain")
    monkeypatch.setattr(loop, "plan_graphs", plan)
    captures = []
    monkeypatch.setattr(Replays, "_prepare", lambda *given: captures.append(1) or StepGraphs._prepare(*given))
    train(tiny(*sections), tmp_path / "replayed")
    assert made[0].replays > 2
    assert len(captures) == 2
    assert machine_free(rows_of(tmp_path / "replayed")) == machine_free(rows_of(tmp_path / "plain"))


def test_an_observed_step_runs_without_graphs():
    class Observer:
        failures, seen = 0, 0

        def selected(self, *_):
            self.seen += 1

        def mixed(self, gates):
            pass

    _, data, state = setup()
    state.graphs = Replays(TOKENS, accumulates=False)
    observer = Observer()
    train_step(state, iter(batches_of(data, 0, state.graphs, 4)), TOKENS, lr=1e-2, observer=observer)
    assert (observer.seen, state.graphs.replays) == (1, 0)
    train_step(state, iter(batches_of(data, 1, state.graphs, 4)), TOKENS, lr=1e-2)
    assert (observer.seen, state.graphs.replays) == (1, 1)


@pytest.mark.parametrize(("place", "replays"), [(0, 0), (1, 3)], ids=["first", "second"])
def test_a_batch_with_more_documents_than_fit_runs_without_graphs(place, replays):
    _, data, plain = setup()
    _, _, state = setup()
    state.graphs = Replays(32, accumulates=True)
    batches = batches_of(data, 0, state.graphs, 1)
    whole = batches[place]
    many = torch.arange(0, 33, 1, dtype=torch.int32)
    batches[place] = Batch(whole.inputs, whole.targets, many, 32).padded(state.graphs.borders)
    assert batches[place].cu_seqlens.shape == (33,)
    assert train_step(state, iter(batches), TOKENS, lr=1e-2) == train_step(plain, iter(batches), TOKENS, lr=1e-2)
    assert (state.graphs.replays, state.graphs.overflows) == (replays, 1)
    assert torch.equal(plain.trainable[0], state.trainable[0])


def test_gradients_of_a_step_that_was_skipped_come_back():
    _, data, state = setup()
    state.graphs = Replays(TOKENS, accumulates=False)
    batch = batches_of(data, 0, state.graphs, 4)
    assert train_step(state, iter(batch), TOKENS, lr=1e-2).updated
    with torch.no_grad():
        state.model.norm.weight.mul_(torch.inf)
    assert not train_step(state, iter(batch), TOKENS, lr=1e-2).updated
    with torch.no_grad():
        state.model.norm.weight.fill_(1.0)
    assert all(parameter.grad is None for parameter in state.trainable)
    assert train_step(state, iter(batch), TOKENS, lr=1e-2).updated
    assert all(parameter.grad is not None for parameter in state.trainable)


def test_padded_batches_have_one_number_of_borders():
    batch = Batch(torch.zeros(1, 12), torch.zeros(1, 12), torch.tensor([0, 5, 12], dtype=torch.int32), 12)
    assert batch.padded(6).cu_seqlens.tolist() == [0, 5, 12, 12, 12, 12]
    assert batch.padded(6).cu_seqlens.dtype == torch.int32
    assert batch.padded(2) is batch
    assert batch.padded(None) is batch
    assert Batch(batch.inputs, batch.targets, None).padded(6).cu_seqlens is None


def test_a_capture_that_fails_is_a_reason_for_auto_and_an_error_when_required():
    class Fails(Replays):
        def _capture(self, work, pool):
            raise RuntimeError("operation not permitted\nwhen a stream is capturing")

    _, data, state = setup()
    state.graphs = Fails(TOKENS, accumulates=False)
    assert train_step(state, iter(batches_of(data, 0, state.graphs, 4)), TOKENS, lr=1e-2).updated
    assert state.graphs.reason == "the step could not be captured: RuntimeError: operation not permitted"
    state.graphs = Fails(TOKENS, accumulates=False, required=True)
    with pytest.raises(ConfigError, match=r"runtime\.cuda_graphs: the step could not be captured"):
        train_step(state, iter(batches_of(data, 1, state.graphs, 4)), TOKENS, lr=1e-2)


@pytest.mark.parametrize(
    ("world", "overrides", "reason"),
    [
        (CUDA, [], None),
        (CUDA, ["runtime.cuda_graphs=false"], "runtime.cuda_graphs is false"),
        (World(torch.device("cpu")), [], "the run is not on a GPU"),
        (World(torch.device("cuda"), "ddp", size=2), [], "ddp exchanges tensors"),
        (World(torch.device("cuda"), "fsdp", size=2), [], "fsdp exchanges tensors"),
        (CUDA, ["telemetry.trace_grads=true"], "telemetry.trace_"),
    ],
)
def test_auto_says_why_a_run_has_no_graphs(world, overrides, reason):
    faults.arm("")  # what another test of this process left
    graphs = plan_graphs(tiny(*overrides), world, 2)
    if reason is None:
        assert graphs.reason is None
        assert graphs.accumulates
        assert graphs.borders == 2 * 32 // 256 + 16
    else:
        assert graphs.reason.startswith(reason)
        assert graphs.borders is None
        if not overrides or "trace" in overrides[0]:
            with pytest.raises(ConfigError, match=r"runtime\.cuda_graphs: cannot be true"):
                plan_graphs(tiny(*overrides, "runtime.cuda_graphs=true"), world, 2)


def test_auto_needs_memory_for_a_pass_with_graphs_and_one_without():
    assert memory_refusal(10 << 30, 23 << 30) is None
    assert memory_refusal(10 << 30, 21 << 30) == "a pass needs 10.0 GiB, twice with graphs, and 21.0 GiB are free"


def test_injected_faults_turn_graphs_off():
    faults.arm("step.loss:nan:hit=99")
    try:
        assert plan_graphs(tiny(), CUDA, 4).reason == "faults are injected into the steps"
    finally:
        faults.arm("")


def test_a_run_records_why_it_has_no_graphs(tmp_path):
    train(tiny("train.steps=1"), tmp_path / "run")
    for name in ("env.json", "metrics.json"):
        found = json.loads((tmp_path / "run" / name).read_text())["cuda_graphs"]
        assert found == "off: the run is not on a GPU"


def test_a_whole_run_with_graphs_has_the_rows_of_one_without(tmp_path, monkeypatch):
    train(tiny(), tmp_path / "plain")
    graphs = Replays(TOKENS, accumulates=False)
    monkeypatch.setattr(loop, "plan_graphs", lambda *_: graphs)
    train(tiny(), tmp_path / "graphs")
    assert machine_free(rows_of(tmp_path / "graphs")) == machine_free(rows_of(tmp_path / "plain"))
    assert graphs.replays == 5  # attention is sampled in the first of six steps
    assert graphs_of(tmp_path / "graphs") == "on"


def test_a_run_says_when_graphs_turn_themselves_off(tmp_path, monkeypatch):
    class Fails(Replays):
        def _capture(self, work, pool):
            raise RuntimeError("no")

    monkeypatch.setattr(loop, "plan_graphs", lambda *_: Fails(TOKENS, accumulates=False))
    train(tiny("train.steps=3"), tmp_path / "run")
    line = "graphs  off from step 2 on: the step could not be captured: RuntimeError: no"
    assert (tmp_path / "run" / "run.log").read_text().count(line) == 1
    assert graphs_of(tmp_path / "run").startswith("off: the step could not be captured")


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
REAL = [
    "runtime.device=cuda", "model.dim=128", "model.n_heads=4", "model.n_kv_heads=2", "model.head_dim_k=32",
    "model.head_dim_v=32", "data.source=python", "train.seq_len=512", "train.steps=50", "train.lr=1e-3",
    "train.eval_every=20", "telemetry.every=10", "checkpoint.every=1000",
]  # fmt: skip


def losses(folder, *overrides):
    train(tiny(*REAL, *overrides), folder)
    return [float(row["loss"]) for row in rows_of(folder)]


def graphs_of(folder):
    return json.loads((folder / "metrics.json").read_text())["cuda_graphs"]


class TestOnAGPU:
    pytestmark = gpu

    @pytest.mark.parametrize(
        "override",
        [
            "train.log_every=10",
            "train.micro_batch=1",
            "data.isolate_documents=false",
            "runtime.gradient_checkpointing=block",
            "runtime.gradient_checkpointing=selective",
            "runtime.precision=fp16",
            "model.attention=dense",
            "model.layer_pattern=[nsa,dense]",
            "nsa.phi=mlp",
        ],
    )
    def test_fifty_steps_in_16_bits_have_the_losses_of_plain_ones(self, tmp_path, override):
        # Deterministic: graphs are compared, not the order in which the kernels add.
        fixed = [*([] if "precision" in override else ["runtime.precision=bf16"]), "runtime.deterministic=true"]
        replayed = losses(tmp_path / "graphs", *fixed, override, "runtime.cuda_graphs=true")
        plain = losses(tmp_path / "plain", *fixed, override, "runtime.cuda_graphs=false")
        assert graphs_of(tmp_path / "graphs") == "on"
        assert max(abs(a - b) for a, b in zip(replayed, plain, strict=True)) <= 1e-3

    @pytest.mark.parametrize(
        "override", ["train.log_every=10", "train.micro_batch=2", "runtime.gradient_checkpointing=block"]
    )
    def test_deterministic_steps_in_fp32_are_equal_to_the_bit(self, tmp_path, override):
        fixed = ["runtime.precision=fp32", "runtime.deterministic=true", override]
        replayed = losses(tmp_path / "graphs", *fixed, "runtime.cuda_graphs=true")
        assert replayed == losses(tmp_path / "plain", *fixed, "runtime.cuda_graphs=false")

    def test_a_resumed_run_continues_to_the_bit(self, tmp_path):
        fixed = ["runtime.precision=fp32", "runtime.deterministic=true", "train.schedule=constant"]
        whole = losses(tmp_path / "whole", *fixed, "runtime.cuda_graphs=true", "train.steps=20")
        losses(tmp_path / "halves", *fixed, "runtime.cuda_graphs=true", "train.steps=9")
        config = tiny(*REAL, *fixed, "runtime.cuda_graphs=true", "train.steps=20")
        train(config, tmp_path / "halves", accept_changes=True)
        assert [float(row["loss"]) for row in rows_of(tmp_path / "halves")] == whole

    def test_a_compiled_model_is_replayed(self, tmp_path):
        fixed = ["runtime.precision=bf16", "runtime.compile=true"]
        replayed = losses(tmp_path / "graphs", *fixed, "runtime.cuda_graphs=true")
        plain = losses(tmp_path / "plain", *fixed, "runtime.cuda_graphs=false")
        assert graphs_of(tmp_path / "graphs") == "on"
        assert max(abs(a - b) for a, b in zip(replayed, plain, strict=True)) <= 1e-3
