"""What each phase of `nsa ready` trains: the user's configuration with as little changed as the phase needs."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.config import Config, parse_config
from nsa.record.schema import MACHINE_COLUMNS, TRAINING, WEIGHTS_FILE, read_events, read_rows

DEEP_LAYERS, DEEP_TOKENS = 12, 2048  # a size at which an earlier system hung


@dataclass(frozen=True)
class Scale:
    """Steps of each phase. The resumed run is killed as its `killed_at`th step begins."""

    label: str
    synthetic: int
    data: int
    resume: int
    save_every: int
    killed_at: int


FULL = Scale("full", synthetic=200, data=300, resume=20, save_every=6, killed_at=15)
QUICK = Scale("quick", synthetic=20, data=30, resume=8, save_every=2, killed_at=6)


def changed(config: Config, **changes: Any) -> Config:
    """The configuration with `section__key=value` in place; validated again as a whole."""
    tree = copy.deepcopy(config.to_dict())
    for name, value in changes.items():
        section, key = name.split("__")
        tree[section][key] = value
    return parse_config(tree, "readiness")


def short_run(config: Config, steps: int) -> Config:
    """So few steps that saving, validation and sampling would not come up are given one of each."""
    return changed(
        config,
        train__steps=steps,
        train__log_every=min(config.train.log_every, max(1, steps // 10)),
        train__profile_steps=None,
        checkpoint__every=min(config.checkpoint.every or steps, max(1, steps // 2)),
        telemetry__every=min(config.telemetry.every, max(1, steps // 4)),
    )


def synthetic(config: Config) -> Config:
    return changed(config, data__source="synthetic", data__paths=[], data__mixture=[])


def is_deep(config: Config) -> bool:
    """Whether the configuration itself is at least as large as the size that once hung."""
    return (
        config.model.n_layers >= DEEP_LAYERS
        and config.train.seq_len >= DEEP_TOKENS
        and config.runtime.gradient_checkpointing != "none"
    )


def deep(config: Config, nproc: int) -> Config:
    """Twelve layers, 2048 tokens, recomputed blocks, a sequence a rank."""
    recompute = config.runtime.gradient_checkpointing
    return changed(
        config,
        model__n_layers=max(DEEP_LAYERS, config.model.n_layers),
        train__seq_len=max(DEEP_TOKENS, config.train.seq_len),
        train__batch_size=nproc,
        train__micro_batch="auto",
        data__validation_fraction=0.0,
        train__init_from=None,  # weights of another depth
        runtime__gradient_checkpointing="block" if recompute == "none" else recompute,
    )


def resumable(config: Config, scale: Scale) -> Config:
    """Deterministic, so that going on can be compared bit by bit; saves are waited for, so that one is there when the
    kill comes however fast the steps are."""
    return changed(
        short_run(config, scale.resume),
        runtime__deterministic=True,
        checkpoint__every=scale.save_every,
        checkpoint__background=False,
    )


def resumed_from(folder: Path) -> list[str | None]:
    """The checkpoint that each start of the run took up."""
    return [event.get("from_checkpoint") for event in read_events(folder) if event["event"] == "start"]


def first_difference(whole: Path, resumed: Path) -> str:
    """Where two runs that should be the same differ first; nothing where they do not."""
    ours, theirs = _numbers(whole), _numbers(resumed)
    for left, right in zip(ours, theirs, strict=False):
        for name, value in left.items():
            if right.get(name) != value:
                return f"step {left['step']}: {name} is {right.get(name)} and was {value}"
    if len(ours) != len(theirs):
        return f"{len(theirs)} rows instead of {len(ours)}"
    if (whole / WEIGHTS_FILE).read_bytes() != (resumed / WEIGHTS_FILE).read_bytes():
        return "all losses are the same, the weights are not"
    return ""


def _numbers(folder: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if k not in MACHINE_COLUMNS} for row in read_rows(folder, TRAINING)]
