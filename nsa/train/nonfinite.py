"""Dumps a step whose loss or gradient is not finite, so that it can be reproduced.

nonfinite/step_00000151/report.json                 step, loss, gradient norm, configuration
nonfinite/step_00000151/batch_rank{r}.safetensors   the batches of each rank
nonfinite/step_00000151/weights.safetensors         the weights before the step
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save
from torch import Tensor

from nsa.checkpoint.export import load_weights, read_tensors, write_weights
from nsa.checkpoint.format import write_atomically
from nsa.config import parse_config
from nsa.data.loader import Batch
from nsa.data.sequences import IGNORED
from nsa.data.tokenizers import tokenizer_for
from nsa.errors import CheckpointError, NumericsError
from nsa.files import make_folder, read_regular
from nsa.nn.attention import attention_layers
from nsa.parallel.numerics import numerics
from nsa.parallel.strategy import gather_weights
from nsa.run_folder import NONFINITE_FOLDER
from nsa.train.state import RunState, build_state
from nsa.train.step import StepResult, train_step
from nsa.train.trained import load_teacher

if TYPE_CHECKING:
    from nsa.train.loop import Session

_TENSORS = ("inputs", "targets", "cu_seqlens")  # of a batch


def handle(session: "Session", result: StepResult) -> None:
    """Handles a step that left the weights unchanged. Gradients that overflow in fp16 halve the loss scale; any other
    step is dumped, then the run stops or skips it."""
    config, state = session.config, session.state
    scale, progress = state.scale, state.progress
    is_overflow = math.isfinite(result.loss) and math.isfinite(result.index_kl or 0.0)
    if scale.enabled and is_overflow and scale.value > scale.SMALLEST:
        scale.overflowed()  # expected: this is how the scale adapts
        return
    session.monitor.claim.check(state.world)
    with session.monitor.extended_timeout():
        batches = [batch.to(state.device) for batch in session.feed.reread()]
        try:
            kept = f"the step is in {dump(session.folder, state, batches, result)}"
        except (OSError, CheckpointError) as error:
            kept = f"the step could not be written: {error}"
    what = f"step {progress.step + 1}: the loss is {result.loss} and the gradient norm {result.grad_norm}"
    session.monitor.incident("non_finite", f"{what}; {kept}", progress.step)
    progress.skipped += 1
    problem = ""
    if config.train.non_finite == "stop":
        problem = f"the step did not change the weights; {kept}"
    elif progress.skipped > config.train.max_skips:
        problem = f"{progress.skipped} steps were skipped, train.max_skips allows no more"
    if problem:
        with session.monitor.extended_timeout():
            session.checkpointing.wait()  # completes the current save
        raise NumericsError(f"{what}; {problem}")


def dump(folder: Path, state: RunState, batches: list[Batch], result: StepResult) -> Path:
    """Writes the step's batches as whole sequences, and the weights before the step. Every rank calls it."""
    dumped = folder / NONFINITE_FOLDER / f"step_{state.progress.step + 1:08d}"
    weights = gather_weights(state.parameters, state.world)  # a collective: before anything can fail on one rank
    tensors: dict[str, Tensor] = {}
    has_whole = state.world.context is None or state.world.context.rank == 0  # one rank of each context-parallel group
    for number, batch in enumerate(batches if has_whole else ()):
        for name in _TENSORS:
            if (tensor := getattr(batch, name)) is not None:
                tensors[f"{number}/{name}"] = tensor.cpu().clone()  # inputs and targets of one row overlap
    make_folder(dumped.parent)
    make_folder(dumped)
    write_atomically(dumped / f"batch_rank{state.world.rank}.safetensors", save(tensors))
    if state.world.is_first:
        write_weights(dumped / "weights.safetensors", weights, step=state.progress.step)
        report = {
            "step": state.progress.step + 1,
            "loss": str(result.loss),
            "grad_norm": str(result.grad_norm),
            "precision": state.precision,
            "world_size": state.world.size,
            "config": state.config.to_dict(),
        }
        write_atomically(dumped / "report.json", json.dumps(report, indent=1).encode() + b"\n")
    return dumped


def reproduce(dumped: Path) -> StepResult:
    """Runs a dumped step again in one process, and returns its loss and gradient norm."""
    try:
        report: dict[str, Any] = json.loads(read_regular(dumped / "report.json"))
        parts = [read_tensors(dumped / f"batch_rank{r}.safetensors") for r in range(report["world_size"])]
        given, step = report["config"], int(report["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{dumped}: not a complete dump of a step: {error}") from None
    config = parse_config(given, str(dumped / "report.json"), ["parallel.strategy=single", "parallel.context=1"])
    with numerics(config.runtime):
        state = build_state(config, tokenizer_for(config.data), initialize=False)
        if not (dumped / "weights.safetensors").exists():
            raise CheckpointError(f"{dumped}: has no weights; the dump is incomplete")
        load_weights(state.model, dumped / "weights.safetensors")
        for _, layer in attention_layers(state.model):
            layer.start_step(step)
        state.teacher = load_teacher(state)
        batches = []
        for tensors in parts:
            for number in range(len({name.split("/")[0] for name in tensors})):
                inputs, targets, cu_seqlens = (tensors.get(f"{number}/{name}") for name in _TENSORS)
                if inputs is None or targets is None:
                    raise CheckpointError(f"{dumped}: has a batch without inputs or targets")
                batches.append(Batch(inputs, targets, cu_seqlens, config.train.seq_len).to(state.device))
        return train_step(state, batches, sum(int((b.targets != IGNORED).sum()) for b in batches), lr=0.0)
