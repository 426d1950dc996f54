"""The trainer, one process: the same numbers every time, whole artifacts, and a model that learns."""

import csv
import json
import math
import threading
import time
from dataclasses import replace

import pytest
import torch

import nsa.parallel.numerics
from nsa.checkpoint.export import load_weights, write_weights
from nsa.cli.main import app
from nsa.config import parse_config
from nsa.data.build import build_data
from nsa.data.tokenizers import ByteTokenizer
from nsa.errors import CheckpointError, ConfigError, DataError, LaunchError, NumericsError
from nsa.nn.model import build_model
from nsa.run_folder import MACHINE_COLUMNS
from nsa.train import train
from nsa.train.folder import Claim
from nsa.train.state import build_state, describe_batch
from nsa.train.step import train_step, validate
from tests import warm
from tests.distributed.launching import environment, wait_all

TINY = {
    "model": {"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "head_dim_k": 16, "head_dim_v": 16},
    "nsa": {"cmp_block": 4, "cmp_stride": 2, "sel_block": 4, "num_selected": 4, "window": 8},
    "data": {"source": "synthetic"},
    "train": {"steps": 6, "seq_len": 32, "batch_size": 4, "lr": 1e-2, "eval_every": 3, "eval_sequences": 4},
    "runtime": {"device": "cpu", "threads": 1},
}
TOKENS = 128  # of a step
NO_TENSORBOARD = {"telemetry": {"tensorboard": False}}  # its import takes seconds


def tiny(*overrides):
    return parse_config(json.loads(json.dumps(TINY | NO_TENSORBOARD)), "test", overrides)


def rows_of(folder):
    with (folder / "training.csv").open() as file:
        return list(csv.DictReader(file))


def machine_free(rows):
    return [{k: v for k, v in row.items() if k not in MACHINE_COLUMNS} for row in rows]


def setup(*overrides):
    config, tokenizer = tiny(*overrides), ByteTokenizer()
    return config, build_data(config.data, config.train, tokenizer), build_state(config, tokenizer)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Six steps. Nobody writes into it."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    train(tiny(), folder)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Thirty steps in fp32, in which the loss falls. Nobody writes into it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(tiny("train.steps=30", "runtime.precision=fp32"), folder)
    return folder


def test_a_run_that_fails_leaves_no_thread(tmp_path):
    before = threading.active_count()
    with pytest.raises(NumericsError):
        train(tiny("train.lr=1e38", "train.non_finite=stop"), tmp_path / "run")
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.02)


def test_two_runs_with_one_seed_write_the_same_numbers(plain, tmp_path):
    train(tiny(), tmp_path / "b")
    first, second = rows_of(plain), rows_of(tmp_path / "b")
    assert len(first) == 6
    assert machine_free(first) == machine_free(second)
    assert (plain / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    train(tiny("train.seed=1"), tmp_path / "c")
    assert machine_free(rows_of(tmp_path / "c")) != machine_free(first)


def test_the_csv_holds_every_step_with_full_precision(plain):
    rows = rows_of(plain)
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [int(row["tokens"]) for row in rows] == [TOKENS * n for n in range(1, 7)]
    assert [row["step"] for row in rows if row["val_loss"]] == ["3", "6"]
    loss = float(rows[0]["loss"])
    assert loss == pytest.approx(math.log(256), abs=0.5)
    assert len(rows[0]["loss"]) > 10
    for row in rows:
        assert all(math.isfinite(float(row[c])) for c in ("loss", "lr", "grad_norm", *MACHINE_COLUMNS))
        if row["val_loss"]:  # synthetic text is bytes with one separator in 32
            ratio = float(row["val_bits_per_byte"]) / (float(row["val_loss"]) / math.log(2))
            assert ratio == pytest.approx(32 / 31, rel=1e-6)


def test_the_same_batch_twenty_times_at_rate_zero_gives_bit_identical_losses():
    _, data, state = setup()
    batch = data.train.batch(0, 4)
    results = [train_step(state, iter([batch]), TOKENS, lr=0.0) for _ in range(20)]
    assert len({r.loss for r in results}) == 1
    assert len({r.grad_norm for r in results}) == 1


def test_accumulation_gives_the_same_step_as_one_batch():
    _, data, whole = setup()
    _, _, split = setup()
    one = train_step(whole, iter([data.train.batch(0, 4)]), TOKENS, lr=1e-3)
    four = train_step(split, (data.train.batch(i, 1) for i in range(4)), TOKENS, lr=1e-3)
    assert four.loss == pytest.approx(one.loss, rel=1e-6)
    assert four.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)


@pytest.mark.parametrize("granularity", ["selective", "block", "branch"])
def test_checkpointing_changes_no_bit_of_a_run(plain, tmp_path, granularity):
    train(tiny(f"runtime.gradient_checkpointing={granularity}"), tmp_path)
    assert machine_free(rows_of(tmp_path)) == machine_free(rows_of(plain))


def test_the_gradient_norm_is_the_true_one_and_clipping_bounds_the_step():
    _, data, state = setup("train.grad_clip=0.0")
    batch = data.train.batch(0, 4)
    reference = build_model(tiny(), 256, seed=0)
    loss = torch.nn.functional.cross_entropy(
        reference(batch.inputs, batch.cu_seqlens).flatten(0, 1), batch.targets.flatten()
    )
    loss.backward()
    by_hand = math.sqrt(sum(float(p.grad.double().square().sum()) for p in reference.parameters()))
    result = train_step(state, iter([batch]), TOKENS, lr=1e-3)
    assert result.grad_norm == pytest.approx(by_hand, rel=1e-5)
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    _, _, clipped = setup("train.grad_clip=0.01")
    train_step(clipped, iter([batch]), TOKENS, lr=1e-3)
    after = math.sqrt(sum(float(p.grad.square().sum()) for p in clipped.trainable))
    assert after == pytest.approx(0.01, rel=1e-3)


# A CPU without instructions for fp16 or bf16 takes some 200 times as long for a product: few tokens, at a higher rate.
FEW_TOKENS = ["train.steps=12", "train.seq_len=32", "train.batch_size=1", "train.eval_sequences=1", "train.lr=2e-2"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_lowers_the_loss_in_every_precision(trained, tmp_path, precision, monkeypatch):
    monkeypatch.setattr(nsa.parallel.numerics, "cpu_has_bf16", lambda: True)  # else bf16 would be fp32
    if precision != "fp32":
        train(tiny(*FEW_TOKENS, f"runtime.precision={precision}"), tmp_path)
    losses = [float(row["loss"]) for row in rows_of(trained if precision == "fp32" else tmp_path)]
    assert losses[-1] < losses[0] - 1.0
    if precision == "bf16":
        _, data, state = setup("runtime.precision=fp32", *FEW_TOKENS)
        exact = train_step(state, iter([data.train.batch(0, 1)]), 32, lr=0.0).loss
        assert 1e-6 < abs(losses[0] / exact - 1) < 1e-2, "products were rounded"


@pytest.mark.parametrize("options", [["nsa.phi=mean"], ["nsa.phi=mlp"], ["model.attention=dense"]], ids=str)
@pytest.mark.parametrize("isolate", ["true", "false"])
def test_a_dense_twin_and_every_phi_train(tmp_path, options, isolate):
    train(tiny(*options, f"data.isolate_documents={isolate}"), tmp_path)
    assert float(rows_of(tmp_path)[-1]["loss"]) < float(rows_of(tmp_path)[0]["loss"])


def test_a_non_finite_loss_stops_before_the_weights_move():
    _, data, state = setup()
    with torch.no_grad():
        state.model.norm.weight[0] = math.nan
    before = [p.detach().clone() for p in state.trainable]
    result = train_step(state, iter([data.train.batch(0, 4)]), TOKENS, lr=1e-3)
    assert not result.updated
    assert math.isnan(result.loss)
    # As bits: the poisoned tensor too, whose NaN equals nothing.
    same = [
        torch.equal(a.view(torch.int32), b.detach().view(torch.int32))
        for a, b in zip(before, state.trainable, strict=True)
    ]
    assert all(same)
    assert not state.optimizer.state


def test_validation_reads_the_same_sequences_every_time_and_leaves_no_trace():
    _, data, state = setup()
    before = [p.detach().clone() for p in state.trainable]
    first = validate(state, data.validation, 4, 4)
    assert validate(state, data.validation, 4, 1).loss == pytest.approx(first.loss, rel=1e-6)
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, state.trainable, strict=True))
    assert all(p.grad is None for p in state.trainable)
    assert state.model.training


def test_a_validation_without_a_token_that_counts_is_an_error_of_the_data(monkeypatch):
    """As of a mixture whose conversations have their answers further back."""
    _, data, state = setup()
    real = data.validation.batch
    monkeypatch.setattr(data.validation, "batch", lambda *rows: without_targets(real(*rows)))
    with pytest.raises(DataError, match="none of the 4 validation sequences has a token that counts"):
        validate(state, data.validation, 4, 2)


def without_targets(batch):
    return replace(batch, targets=torch.full_like(batch.targets, -100))


def test_a_finished_run_says_so_and_is_left_alone(tmp_path, capsys):
    train(tiny(), tmp_path)
    stamp = (tmp_path / "model.safetensors").stat().st_mtime_ns
    train(tiny(), tmp_path)
    assert "this run is done (6 steps)" in capsys.readouterr().out
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(ConfigError, match=r"train\.steps: .* holds a finished run"):
        train(tiny("train.steps=9"), tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == stamp
    (tmp_path / "metrics.json").write_text('{"status": "done"}')
    train(tiny(), tmp_path)
    assert json.loads((tmp_path / "metrics.json").read_text())["steps"] == 6, "a summary without steps is written again"
    train(tiny(), tmp_path, fresh=True)
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns != stamp


@pytest.mark.parametrize(
    ("overrides", "groups", "said"),
    [
        ((), 1, "1 rank x 1 pass x 4 sequences"),
        (("train.micro_batch=1",), 2, "2 ranks x 2 passes x 1 sequence"),
        (("parallel.context=2",), 1, "1 group of 2 ranks x 1 pass x 4 sequences"),
        (("parallel.context=4", "train.micro_batch=2"), 2, "2 groups of 4 ranks x 1 pass x 2 sequences"),
    ],
)
def test_the_start_says_how_a_batch_is_divided(overrides, groups, said):
    assert describe_batch(tiny("train.batch_size=4", *overrides), groups) == said


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    with Claim(tmp_path).hold(), pytest.raises(LaunchError, match=r"train\.out_dir: another run"):
        train(tiny(), tmp_path)
    train(tiny(), tmp_path)


def test_a_run_can_start_from_saved_weights(trained, tmp_path):
    train(tiny("train.steps=1", f"train.init_from={trained}"), tmp_path)
    assert float(rows_of(tmp_path)[0]["loss"]) < float(rows_of(trained)[0]["loss"]) - 1.0


@pytest.mark.parametrize("tied", [False, True])
def test_saved_weights_load_to_the_last_bit(tmp_path, tied):
    config = tiny(f"model.tied_head={str(tied).lower()}")
    model = build_model(config, 256, seed=0)
    write_weights(tmp_path / "model.safetensors", model.state_dict(keep_vars=True), step=1)
    other = build_model(config, 256, seed=9)
    load_weights(other, tmp_path / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"], "nothing is left beside the file"
    wrong = tiny("model.n_layers=2")
    with pytest.raises(
        CheckpointError, match=r"does not fit this model: it lacks blocks\.1\.(\S+, ){2}\S+ and \d+ more;"
    ):
        load_weights(build_model(wrong, 256, seed=0), tmp_path / "model.safetensors")
    narrow = tiny("model.mlp_dim=64", f"model.tied_head={str(tied).lower()}")
    with pytest.raises(CheckpointError, match=r"mlp\.gate\.weight is \[128, 32\] in the file"):
        load_weights(build_model(narrow, 256, seed=0), tmp_path / "model.safetensors")


def test_the_command_prints_step_lines_and_writes_a_run_that_can_write(tmp_path, capsys):
    config = tmp_path / "tiny.yaml"
    config.write_text(json.dumps(TINY))  # JSON is YAML
    command = ("train", "tiny.yaml", "train.log_every=2", "checkpoint.background=false")
    changes = ("--override", "train.steps=4 train.lr=3e-3")
    [ended] = wait_all([warm.start("nsa", *command, *changes, env=environment(), cwd=tmp_path)])
    assert ended.code == 0, ended.output
    out = ended.output
    lines = [line for line in out.splitlines() if line.startswith("step ") and "validation" not in line]
    assert [line.split(" | ")[0] for line in lines] == ["step 0001", "step 0002", "step 0004"]
    assert all(
        [part.split()[0] for part in line.split(" | ")[1:]] == ["loss", "lr", "toks/s", "grad_norm"] for line in lines
    )
    assert "bits per byte" in out
    run = tmp_path / "runs" / "tiny"
    names = {p.name for p in run.iterdir()}
    files = {"config.yaml", "env.json", "metrics.json", "model.safetensors", "training.csv", "heartbeat_rank0.jsonl"}
    files |= {"gate_stats.csv", "k_stats.csv", "k_stats_layers.csv", "fallback_counters.csv"}
    files |= {"dtypes_report.txt", "opt_state_mb.txt"}
    files |= {"run.log", "mem_boot.txt", "mem_boot.json", "mem_step1.txt", "mem_step1.json"}
    assert names == {".lock", "checkpoints", "tb", *files}
    assert json.loads((run / "metrics.json").read_text())["steps"] == 4

    def generate(*arguments):
        app(["generate", str(run), *arguments], standalone_mode=False)
        return capsys.readouterr().out

    same = [generate("--prompt", "ka lo", "--max-tokens", "12", "--seed", "3") for _ in range(2)]
    assert same[0] == same[1]
    assert same[0].startswith("ka lo")
    both = generate("--max-tokens", "5", "--beside-untrained")
    assert both.index("--- before training ---") < both.index("--- after training ---")
