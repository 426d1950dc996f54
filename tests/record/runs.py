"""Folders of runs for tests: a real small one, and long ones that are made up."""

import json
import math
import random
from dataclasses import fields
from pathlib import Path

from nsa import run_folder
from nsa.config import parse_config
from nsa.train import train

TINY = {
    "model": {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim_k": 16, "head_dim_v": 16},
    "nsa": {"cmp_block": 8, "cmp_stride": 4, "sel_block": 8, "num_selected": 4, "window": 16},
    "data": {"source": "synthetic"},
    "train": {"steps": 30, "seq_len": 64, "batch_size": 4, "eval_every": 10, "eval_sequences": 4},
    "runtime": {"device": "cpu", "threads": 1},
    "telemetry": {"tensorboard": False, "every": 5},
}
HEADER = (
    "step,tokens,loss,lr,grad_norm,toks_per_s,step_s,data_wait_s,mem_gib,val_loss,val_bits_per_byte,save_wait_s,skipped"
)
GATES = "step,layer,rows,mean_entropy,min_entropy,largest_share,collapsed,share_cmp,share_sel,share_win"
BINS = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64-127", "128-255", "256-511", "512-1023", "1024+")
SELECTION = "step,rows,mean_distinct,max_distinct,share_at_max,share_forced,agreement," + ",".join(
    f"distance_{name}" for name in BINS
)
LAYER_SELECTION = SELECTION.replace("step,", "step,layer,")
# The fields of each event besides run_folder.COMMON_FIELDS.
EVENT_FIELDS: dict[run_folder.EventKind, tuple[str, ...]] = {
    "boot": ("pid", "host", "boot_id", "start_ticks"),
    "first_batch": ("seconds", "data"),
    "start": ("strategy", "world_size", "backend", "steps", "fresh", "from_checkpoint", "pid", "host"),
    "step": (*run_folder.TRAINING.columns[1:], "telemetry_failures"),
    "gates": tuple(
        f.name for f in fields(run_folder.GateStats)
    ),  # and `layers`: these fields per layer, with `layer`; the heartbeat omits it
    "selection": tuple(f.name for f in fields(run_folder.SelectionStats)),  # and `layers`, as above
    "fallbacks": ("counts",),  # lists of operator, reason, count
    "data_stall": ("seconds", "message"),
    "save_wait": ("seconds", "writing"),  # training waits until the checkpoint of step `writing` is saved
    "attention": ("message",),  # the layers compute something else from this step on
    "incident": ("kind", "message"),
    "hang": ("phase", "silent_s", "limit_s", "file", "ranks"),  # tables of rank, step, event, age_s, pid, host, state
    "preempted": (),
    "end": (),
}
BEGAN = 1_700_000_000.0


def real_run(folder: Path) -> Path:
    """A run that trained, about four seconds."""
    train(parse_config(TINY, "test", []), folder)
    return folder


def training_row(step: int, **other: object) -> str:
    value = {
        "tokens": step * 65536,
        "loss": 2.0 + 8.0 * math.exp(-step / 4000) + 0.1 * math.sin(step * 12.9898),
        "lr": 3e-4 * min(1.0, step / 2000),
        "grad_norm": 0.4 + 0.1 * math.sin(step * 78.233),
        "toks_per_s": 120_000.0 + 2000 * math.sin(step / 7),
        "step_s": 0.55,
        "data_wait_s": 0.004,
        "mem_gib": 31.5,
        "val_loss": "" if step % 1000 else 2.1 + 8.0 * math.exp(-step / 4000),
        "val_bits_per_byte": "" if step % 1000 else 0.9,
        "save_wait_s": 0.0,
        "skipped": 0,
        **other,
    }
    return f"{step}," + ",".join(str(cell) for cell in value.values()) + "\n"


def event(name: str, step: int, rank: int = 0, at: float | None = None, **values: object) -> str:
    time = BEGAN + step * 0.55 if at is None else at
    return json.dumps({"v": 1, "time": time, "rank": rank, "step": step, "event": name, **values}) + "\n"


def long_run(folder: Path, rows: int = 50_000, layers: int = 16, every: int = 100) -> Path:
    """A run of many steps as the trainer would leave it, still going on; a spike of the loss is in its middle."""
    chance = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    spike = rows // 2
    with (folder / "training.csv").open("w") as file:
        file.write(HEADER + "\n")
        for step in range(1, rows + 1):
            file.write(training_row(step, **({"loss": 9.75, "grad_norm": 210.0} if step == spike else {})))
    with (folder / "heartbeat_rank0.jsonl").open("w") as file:
        file.write(event("boot", 0, pid=1, host="node"))
        file.write(event("start", 0, strategy="fsdp2", world_size=8, steps=2 * rows, from_checkpoint=None))
        for step in range(1, rows + 1):
            file.write(event("step", step, loss=2.0, mem_gib=31.5, data_wait_s=0.004, toks_per_s=120000.0))
            if step == spike:
                file.write(event("incident", step, kind="loss_spike", message="the loss jumped"))
    with (folder / "gate_stats.csv").open("w") as file:
        file.write(GATES + "\n")
        for step in range(every, rows + 1, every):
            for layer in range(layers):
                win = 0.3 + 0.2 * step / rows * (layer / layers) + 0.01 * chance.random()
                sel = 0.3 + 0.1 * math.sin(layer)
                shares = f"{1 - win - sel},{sel},{win}"
                name = f"blocks.{layer}.attention"
                file.write(f"{step},{name},2048,{1.09 - 0.4 * step / rows * layer / layers},0.4,0.9,0.02,{shares}\n")
            file.write(f"{step},all,32768,1.0,0.4,0.9,0.02,0.3,0.3,0.4\n")
    with (folder / "k_stats.csv").open("w") as file:
        file.write(SELECTION + "\n")
        for step in range(every, rows + 1, every):
            raw = [math.exp(-((at - 3 - 3 * step / rows) ** 2) / 6) for at in range(len(BINS))]
            distances = ",".join(str(part / sum(raw)) for part in raw)
            file.write(f"{step},4096,15.2,16,0.9,0.2,{0.7 + 0.2 * step / rows},{distances}\n")
    with (folder / "k_stats_layers.csv").open("w") as file:
        file.write(LAYER_SELECTION + "\n")
        for step in range(every, rows + 1, every):
            for layer in range(layers):
                raw = [math.exp(-((at - 2 - 4 * layer / layers) ** 2) / 6) for at in range(len(BINS))]
                distances = ",".join(str(part / sum(raw)) for part in raw)
                values = f"4096,{15 - layer / layers},16,0.9,0.2,{0.6 + 0.3 * layer / layers}"
                file.write(f"{step},blocks.{layer}.attention,{values},{distances}\n")
    (folder / "fallback_counters.csv").write_text("step,branch,reason,count\n")
    (folder / "metrics.json").write_text('{"status": "running", "steps": 0}')
    (folder / "config.yaml").write_text("train:\n  steps: 100000\ntelemetry:\n  watchdog_floor_s: 60.0\n")
    (folder / "env.json").write_text(
        json.dumps({"nsa": "0.1.0", "gpu": ["H100"], "world_size": 8, "strategy": "fsdp2"})
    )
    return folder
