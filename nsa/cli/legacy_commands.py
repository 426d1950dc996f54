"""The old entry points in `scripts/`, which translate their arguments and run `nsa train`.

They add three things. The variable `CONFIG` names the configuration. Without a GPU, a file for GPUs trains on the CPU
with a warning, where `nsa train` raises an error. A run that differs from its file gets a folder whose name lists the
differences, so that the same command resumes its run and different commands never share a folder.
"""

import os
import re
import shlex
import sys
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from nsa.cli.arguments import JoinedOverrides, Overrides, all_overrides
from nsa.cli.main import app as nsa
from nsa.cli.main import main as run_command
from nsa.cli.output import say
from nsa.config import Config, load_config, shipped_names
from nsa.config.load import ConfigWarning
from nsa.errors import ConfigError
from nsa.plain_yaml import flat

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CONFIG = "configs/m7c_125m.yaml"
# Host memory that one pass of a rank may save for backward, and the bytes that it saves, measured on the 125M model.
PASS_GIB = 4.0
BYTES_PER_FEATURE = 85
CPU_EVAL_SEQUENCES = 8
LONGEST_NAME = 120


def main(*, fsdp: bool = False) -> None:
    """Runs a script."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.command()
    def launch(
        overrides: Overrides = None,
        override: JoinedOverrides = None,
        dataset: Annotated[
            str | None, typer.Option(help="data.source: synthetic, python, text, fineweb_edu, hub or prepared.")
        ] = None,
        steps: Annotated[int | None, typer.Option(help="train.steps.")] = None,
        precision: Annotated[str | None, typer.Option(help="runtime.precision: fp32, bf16, fp16 or auto.")] = None,
        ddp: Annotated[
            int | None, typer.Option(min=0, max=1, help="1: parallel.strategy=ddp. 0: one process, on purpose.")
        ] = None,
        synthetic_on_fail: Annotated[
            bool, typer.Option("--synthetic-on-fail", help="Train on synthetic text if the source does not answer.")
        ] = False,
        fresh: Annotated[bool, typer.Option("--fresh", help="Start over: remove the run from its folder.")] = False,
        accept_changes: Annotated[
            bool, typer.Option("--accept-changes", help="Resume from a checkpoint of another configuration.")
        ] = False,
    ) -> None:
        """Train the configuration that CONFIG in the environment names (default configs/m7c_125m.yaml)."""
        file = find_config(os.environ)
        given = [*shorthands(dataset, steps, precision, ddp, fsdp=fsdp), *all_overrides(overrides, override)]
        given = resolve_overrides(file, given, os.environ, one_source=dataset)
        flags = {"--synthetic-on-fail": synthetic_on_fail, "--fresh": fresh, "--accept-changes": accept_changes}
        _run_nsa(["train", str(file), *given, *(name for name, is_given in flags.items() if is_given)])

    run_command(app)


def find_config(environment: Mapping[str, str]) -> Path:
    """Returns the file that CONFIG names, here or else in the repository, or the name of a shipped configuration."""
    name = Path(environment.get("CONFIG") or DEFAULT_CONFIG)
    return name if name.exists() or str(name) in shipped_names() else ROOT / name


def shorthands(
    dataset: str | None, steps: int | None, precision: str | None, ddp: int | None, *, fsdp: bool
) -> list[str]:
    """Returns the overrides for the old arguments."""
    if fsdp and ddp:
        raise ConfigError("--ddp 1: this script shards the model with FSDP; scripts/train_showcase.py runs DDP")
    keys = {"data.source": dataset, "train.steps": steps, "runtime.precision": precision}
    overrides = [f"{key}={value}" for key, value in keys.items() if value is not None]
    if fsdp:
        overrides.append("parallel.strategy=fsdp")
    elif ddp == 1:
        overrides.append("parallel.strategy=ddp")
    elif ddp == 0:
        overrides += ["parallel.strategy=single", "parallel.allow_single_rank=true"]
    return overrides


def resolve_overrides(
    file: Path, given: list[str], environment: Mapping[str, str], *, one_source: str | None
) -> list[str]:
    """Returns the overrides for this machine, the given ones, which win, and the folder of the run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)  # `nsa train` repeats them
        config = load_config(file, given, environment)
    if one_source and config.data.mixture:
        raise ConfigError(f"--dataset {one_source}: {file} mixes several; add data.mixture=[] to read this one alone")
    from torch import cuda

    from nsa.parallel.world import read_launch

    on_cpu = config.runtime.device == "cpu" or not cuda.is_available()
    place = read_launch(environment)
    for_cpu = cpu_overrides(config, place.size) if on_cpu else []
    if for_cpu and place.rank == 0:
        warnings.warn(
            f"runtime.device: no GPU in use, {file} trains on the CPU, where a step may take minutes; "
            f"set for the CPU, unless you override it: {' '.join(for_cpu)}",
            ConfigWarning,
            stacklevel=2,
        )
    if config.train.out_dir is not None:
        return [*for_cpu, *given]
    name = folder_name(file, config) + (",cpu" if for_cpu else "")
    return [*for_cpu, *given, f"train.out_dir={Path('runs') / name}"]


def cpu_overrides(config: Config, ranks: int) -> list[str]:
    """Returns overrides to run a file for GPUs on a CPU: a pass that fits host memory, a log line for every step."""
    overrides = ["runtime.device=cpu"] if config.runtime.device == "cuda" else []
    if config.runtime.compile:
        overrides.append("runtime.compile=false")  # a laptop may have no C++ compiler
    if config.runtime.float8 != "none":
        overrides.append("runtime.float8=none")
    train, model = config.train, config.model
    features = train.batch_size // ranks * train.seq_len * model.n_layers * model.dim
    if features * BYTES_PER_FEATURE < PASS_GIB * 2**30:
        return overrides
    overrides += ["train.log_every=1", f"train.eval_sequences={min(train.eval_sequences, CPU_EVAL_SEQUENCES)}"]
    if train.micro_batch == "auto" and config.runtime.gradient_checkpointing == "none":
        # A static graph allows only one pass per step.
        static = config.parallel.ddp.static_graph and not config.parallel.ddp.safe_mode
        overrides.append("runtime.gradient_checkpointing=block" if static else "train.micro_batch=1")
    return overrides


def folder_name(file: Path, config: Config) -> str:
    """Returns the name of the file with every key that differs from it: `m7c_125m,source=synthetic,steps=10`."""
    try:
        plain = flat(load_config(file).to_dict())
    except ConfigError:  # the file is valid only with its overrides
        return file.stem
    items = flat(config.to_dict()).items()
    changed = {key: value for key, value in items if key not in plain or plain[key] != value}
    parts = [f"{key.rpartition('.')[2]}={_word(value)}" for key, value in changed.items()]
    name = ",".join([file.stem, *parts])
    if len(name) > LONGEST_NAME:
        return f"{name[:LONGEST_NAME]}~{zlib.crc32(name.encode()):08x}"
    return name


def _word(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return re.sub(r"[^\w.+-]+", "_", text)


def _run_nsa(arguments: list[str]) -> None:
    """Runs `nsa` with these arguments, so that env.json and messages show them. Rank 0 prints the new command."""
    if os.environ.get("RANK", "0") == "0":
        start = "torchrun ... -m nsa" if os.environ.get("WORLD_SIZE", "1") != "1" else "nsa"
        say(f"same as {start} {shlex.join(arguments)}")
    sys.argv = ["nsa", *arguments]
    nsa()
