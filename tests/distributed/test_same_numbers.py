"""One process, DDP and FSDP are the same run: losses, gradient norms, validation, with and without checkpointing.

3 layers and 4 steps, in `make test-long` 12 layers and 20 steps; two real processes over gloo (F1, F2, F3, F7 of the
requirements; row 6 of reliability.md).
"""

import copy
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nsa.checkpoint.export import find_checkpoint, read_weights
from nsa.checkpoint.format import shard_file
from nsa.config import parse_config
from nsa.data.build import build_data
from nsa.data.tokenizers import ByteTokenizer
from nsa.nn.model import build_model
from tests.checkpoint.helpers import checkpoint_of, flip_byte, incidents_of
from tests.distributed.launching import TINY, numbers_of, rows_of, start_ranks, wait_all

# The first test waits for all runs, minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)

DEEP = {
    "model": {"n_layers": 12},
    # A rate at which this model learns quietly: at 1e-2 its gradients spike, and rounding grows with every spike.
    "train": {"steps": 20, "eval_every": 10, "schedule": "constant", "lr": 2e-3},
    "checkpoint": {"every": 0},
}
QUICK = {"model": {"n_layers": 3}, "train": {"steps": 4, "eval_every": 2}}
FEW = {"train": {"steps": 2}}  # the first steps: the second shows the gradients of the first
PATTERN = {
    "model": {"n_layers": 4, "layer_pattern": ["dense", "msa", "nsa", "window"], "qk_norm": True},
    "msa": {"block": 16, "num_selected": 1, "num_local": 0, "warmup_steps": 2},
}
# Answers are between a sixth and half of a conversation: ranks and micro-batches have different numbers of targets.
CHAT = {"data": {"source": "chat", "paths": [str(Path(__file__).with_name("chats.jsonl"))], "validation_fraction": 0.2}}
SHORT = {"train": {"steps": 4, "eval_every": 0}, "checkpoint": {"every": 0}}


def tree(*layers):
    """TINY with the sections of each layer laid over it; nested sections are joined."""
    joined = copy.deepcopy(TINY)

    def lay(below, above):
        for key, value in above.items():
            if isinstance(value, dict):
                lay(below.setdefault(key, {}), value)
            else:
                below[key] = value

    for layer in layers:
        lay(joined, layer)
    return joined


def recompute(granularity):
    return {"runtime": {"gradient_checkpointing": granularity}}


def strategy(name, **options):
    return {"parallel": {"strategy": name, name: options}} if options else {"parallel": {"strategy": name}}


STRATEGIES = ("ddp", "fsdp")
ONE_RANK = {
    "single": tree(DEEP, QUICK),
    "single-block": tree(DEEP, QUICK, FEW, recompute("block")),
    "short": tree(SHORT),
    "short-accumulated": tree(SHORT, {"train": {"micro_batch": 1}}),
    "short-cmp": tree(SHORT, {"nsa": {"force_branch": "cmp"}}),
    "short-pattern": tree(SHORT, PATTERN, CHAT),
    "ddp-alone": tree(SHORT, strategy("ddp")),
    "fsdp-alone": tree(SHORT, strategy("fsdp")),
    "constant": tree({"train": {"steps": 8, "schedule": "constant"}}),
}
TWO_RANKS = {
    **{f"{s}-none": tree(DEEP, QUICK, strategy(s)) for s in STRATEGIES},
    **{f"{s}-block": tree(DEEP, QUICK, FEW, strategy(s), recompute("block")) for s in STRATEGIES},
    **{f"{s}-accumulated": tree(SHORT, strategy(s), {"train": {"micro_batch": 1}}) for s in STRATEGIES},
    "fsdp-bf16": tree(SHORT, strategy("fsdp"), {"runtime": {"precision": "bf16"}}),
    "ddp-safe": tree(SHORT, strategy("ddp", safe_mode=True)),
    "ddp-static": tree(SHORT, strategy("ddp", static_graph=True), recompute("block")),
    "fsdp-grad-op": tree(SHORT, strategy("fsdp", sharding="grad_op", forward_prefetch=False)),
    "fsdp-cmp": tree(SHORT, strategy("fsdp"), {"nsa": {"force_branch": "cmp"}}),
    "ddp-pattern": tree(SHORT, strategy("ddp"), PATTERN, CHAT, {"train": {"micro_batch": 1}}),
    "fsdp-pattern": tree(SHORT, strategy("fsdp"), PATTERN, CHAT),
    "half": tree({"train": {"steps": 4, "schedule": "constant"}}, strategy("fsdp")),
}
# Trained where a test of `make test-long` needs them.
LONG_ONE_RANK = {
    "single-20": tree(DEEP),
    "single-muon": tree(SHORT, {"train": {"optimizer": "muon"}}),
    **{f"single-{g}": tree(DEEP, QUICK, FEW, recompute(g)) for g in ("selective", "branch")},
}
LONG_TWO_RANKS = {
    **{f"{s}-20": tree(DEEP, strategy(s)) for s in STRATEGIES},
    **{f"{s}-block-20": tree(DEEP, strategy(s), recompute("block")) for s in STRATEGIES},
    **{
        f"{s}-{g}": tree(DEEP, QUICK, FEW, strategy(s), recompute(g))
        for s in STRATEGIES
        for g in ("selective", "branch")
    },
    "ddp-bf16": tree(SHORT, strategy("ddp"), {"runtime": {"precision": "bf16"}}),
    **{f"{s}-fp16": tree(SHORT, strategy(s), {"runtime": {"precision": "fp16"}}) for s in STRATEGIES},
    "ddp-muon": tree(SHORT, strategy("ddp"), {"train": {"optimizer": "muon"}}),
    "ddp-cmp": tree(SHORT, strategy("ddp"), {"nsa": {"force_branch": "cmp"}}),
    "ddp-unused": tree(SHORT, strategy("ddp", find_unused=True, bucket_view=False), recompute("block")),
    "ddp-buckets": tree(SHORT, strategy("ddp", bucket_mb=1, broadcast_buffers=True)),
    "fsdp-units": tree(SHORT, strategy("fsdp", blocks_per_unit=2), {"model": {"n_layers": 5}}),
    "units": tree(SHORT, strategy("ddp"), {"model": {"n_layers": 5}}),
    "fsdp-tied": tree(SHORT, strategy("fsdp"), {"model": {"tied_head": True}}),
    "ddp-tied": tree(SHORT, strategy("ddp"), {"model": {"tied_head": True}}),
    "fsdp-reduce-bf16": tree(SHORT, strategy("fsdp", reduce_dtype="bf16")),
}


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Every run above that the selected tests look at, trained once."""
    folder = tmp_path_factory.mktemp("runs")
    any_long = any(item.get_closest_marker("long") for item in request.session.items if item.path == request.path)
    one, two = (ONE_RANK | LONG_ONE_RANK, TWO_RANKS | LONG_TWO_RANKS) if any_long else (ONE_RANK, TWO_RANKS)
    named = {size: [{"name": name, "config": run} for name, run in runs.items()] for size, runs in ((1, one), (2, two))}
    train_beside(folder, named)
    return folder


def train_all(folder, size, jobs):
    """Trains them one after the other, on `size` ranks."""
    train_beside(folder, {size: jobs})


def train_beside(folder, jobs):
    """Trains the jobs of every number of ranks one after the other, beside those of the other numbers."""
    processes = []
    for size, listed in jobs.items():
        path = folder / f"jobs{size}.json"
        path.write_text(json.dumps([{**job, "folder": str(folder / job["name"])} for job in listed]))
        processes += start_ranks(size, str(path), module="tests.distributed.worker")
    ended = wait_all(processes, timeout_s=800)
    assert [e.code for e in ended] == [0] * len(ended), "\n".join(e.output for e in ended)
    for size, listed in jobs.items():
        for job in listed:
            for rank in range(size):
                outcome = json.loads((folder / job["name"] / f"outcome_rank{rank}.json").read_text())
                assert outcome == {"code": 0, "error": ""}, job["name"]


def column(run, name):
    return [float(row[name]) for row in rows_of(run) if row[name]]


def assert_same(a, b, loss, norm):
    assert column(a, "loss") == pytest.approx(column(b, "loss"), rel=loss, abs=0)
    assert column(a, "grad_norm") == pytest.approx(column(b, "grad_norm"), rel=norm, abs=0)


@pytest.mark.parametrize(("one", "other"), [("single", "none"), long("single-20", "20"), long("single-20", "block-20")])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_strategy_gives_the_numbers_of_one_process(runs, kind, one, other):
    one, many = runs / one, runs / f"{kind}-{other}"
    assert column(many, "loss")[0] == pytest.approx(column(one, "loss")[0], rel=1e-6)
    assert_same(many, one, loss=1e-5, norm=1e-4)
    assert column(many, "val_loss") == pytest.approx(column(one, "val_loss"), rel=1e-5)
    assert [row["tokens"] for row in rows_of(many)] == [row["tokens"] for row in rows_of(one)]


@pytest.mark.parametrize(
    ("kind", "granularity"),
    [
        *((kind, "block") for kind in ("single", *STRATEGIES)),
        *(long("single", granularity) for granularity in ("selective", "branch")),
        *(long(kind, granularity) for kind in STRATEGIES for granularity in ("selective", "block-20", "branch")),
    ],
)
def test_checkpointing_changes_no_bit(runs, kind, granularity):
    plain = runs / ("single" if kind == "single" else f"{kind}-20" if granularity == "block-20" else f"{kind}-none")
    recomputed = runs / f"{kind}-{granularity}"
    for name in ("loss", "grad_norm"):
        assert column(recomputed, name) == column(plain, name)[: len(column(recomputed, name))]


@pytest.mark.parametrize("kind", ["short", "ddp", "fsdp"])
def test_accumulation_gives_the_same_run(runs, kind):
    assert_same(runs / f"{kind}-accumulated", runs / "short", loss=1e-6, norm=1e-5)


@pytest.mark.parametrize(
    "name",
    ["ddp-alone", "fsdp-alone", "ddp-safe", "ddp-static", "fsdp-grad-op", long("ddp-unused"), long("ddp-buckets")],
)
def test_an_option_does_not_change_the_results(runs, name):
    assert_same(runs / name, runs / "short", loss=1e-6, norm=1e-5)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("fsdp-cmp", "short-cmp"),
        ("fsdp-pattern", "short-pattern"),
        ("ddp-pattern", "short-pattern"),
        long("ddp-cmp", "short-cmp"),
        long("ddp-muon", "single-muon"),
        long("fsdp-units", "units"),
        long("fsdp-tied", "ddp-tied"),
    ],
)
def test_pairs_agree(runs, name, other):
    assert_same(runs / name, runs / other, loss=1e-6, norm=1e-5)
    assert column(runs / name, "val_loss") == pytest.approx(column(runs / other, "val_loss"), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "precision"), [("fsdp", "bf16"), long("ddp", "bf16"), long("ddp", "fp16"), long("fsdp", "fp16")]
)
def test_lower_precision_stays_close(runs, kind, precision):
    assert column(runs / f"{kind}-{precision}", "loss") == pytest.approx(column(runs / "short", "loss"), rel=2e-2)
    assert [row["skipped"] for row in rows_of(runs / f"{kind}-{precision}")].count("0") >= 3


@pytest.mark.long
def test_gradients_reduced_in_bf16_stay_close(runs):
    assert column(runs / "fsdp-reduce-bf16", "loss") == pytest.approx(column(runs / "short", "loss"), rel=1e-2)


def test_the_logged_gradient_norm_is_the_true_one(runs):
    config = parse_config(tree(DEEP, QUICK), "test")
    batch = build_data(config.data, config.train, ByteTokenizer()).train.batch(0, 4)
    model = build_model(config, 256, seed=0)
    logits = model(batch.inputs, batch.cu_seqlens)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
    by_hand = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    for name in ("single", "ddp-none", "ddp-block", "fsdp-none", "fsdp-block"):
        assert column(runs / name, "grad_norm")[0] == pytest.approx(by_hand, rel=1e-5), name


def test_safe_mode_and_every_rank_are_announced(tmp_path):
    (tmp_path / "run.yaml").write_text(
        json.dumps(tree(SHORT, {"train": {"steps": 1}}, strategy("ddp", safe_mode=True)))
    )
    ended = wait_all(start_ranks(2, "train", str(tmp_path / "run.yaml"), f"train.out_dir={tmp_path / 'run'}"))
    assert [e.code for e in ended] == [0, 0]
    assert "safe_mode: reference kernels; under ddp find_unused=True, bucket_mb=2, bucket_view=False" in ended[0].output
    for rank, one in enumerate(ended):
        assert f"rank {rank} of 2 | local rank {rank} | device cpu | backend gloo | strategy ddp" in one.output
    assert "loss" not in ended[1].output


def test_a_checkpoint_of_two_sharded_ranks_resumes_anywhere(runs, tmp_path):
    """Weights and optimizer are exact in another world: the rest of the run has the numbers of an unbroken one. Damage
    that one rank finds makes all ranks take the checkpoint before."""
    whole = find_checkpoint(runs / "half")
    weights = read_weights(whole)
    exported = load_file(runs / "half" / "model.safetensors")
    assert weights.keys() == exported.keys()
    assert all(torch.equal(weights[name], exported[name]) for name in weights)
    jobs = {1: [], 2: []}
    for name in ("single", "ddp", "fsdp"):
        listed = jobs[1 if name == "single" else 2]
        if name != "fsdp":  # resumed with nothing left to do: the weights are written as this world has them
            shutil.copytree(runs / "half", tmp_path / f"{name}-same")
            config = tree({"train": {"steps": 4, "schedule": "constant"}}, strategy(name))
            listed.append({"name": f"{name}-same", "config": config, "accept_changes": True})
        shutil.copytree(runs / "half", tmp_path / name)
        if name == "fsdp":
            flip_byte(checkpoint_of(tmp_path / name, 4) / shard_file(1), 0.5)
        config = tree({"train": {"steps": 8, "schedule": "constant"}}, strategy(name))
        listed.append({"name": name, "config": config, "accept_changes": True})
    train_beside(tmp_path, jobs)
    (damage,) = incidents_of(tmp_path / "fsdp")
    assert shard_file(1) in damage["message"]
    for name in ("single", "ddp", "fsdp"):
        if name != "fsdp":
            again = load_file(tmp_path / f"{name}-same" / "model.safetensors")
            assert all(torch.equal(again[key], weights[key]) for key in weights)
        assert [row["step"] for row in rows_of(tmp_path / name)] == [str(n) for n in range(1, 9)]
        assert_same(tmp_path / name, runs / "constant", loss=1e-5, norm=1e-4)


def test_three_ranks_resume_to_the_bit(tmp_path):
    """Unlike two numbers, three have a sum that depends on their order: DDP moves gradients to other places in its
    buckets after the first step of a process."""
    train = {"batch_size": 3, "schedule": "constant"}
    until = {
        n: tree(strategy("ddp"), {"train": {**train, "steps": n}, "data": {"validation_fraction": 0}}) for n in (2, 4)
    }
    jobs = [{"name": name, "config": until[n]} for name, n in (("whole", 4), ("run", 2), ("run", 4))]
    train_all(tmp_path, 3, [{**job, "accept_changes": True} for job in jobs])
    assert numbers_of(tmp_path / "run") == numbers_of(tmp_path / "whole")
    weights, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "whole"))
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
