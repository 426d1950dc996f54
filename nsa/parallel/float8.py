"""Linear layers that multiply in 8-bit floating point (FP8), by torchao.

Converts the projections of attention and MLP in every block. The head, the gates, the compressors and the index of MSA
are not converted. Parameters keep their names and stay tensors of high precision, which are cast and scaled in every
pass: a checkpoint is the same with and without FP8.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from nsa.errors import ConfigError
from nsa.installation import how_to_install
from nsa.nn.attention import Attention
from nsa.nn.block import DecoderBlock
from nsa.nn.projection import is_float8

MULTIPLE = 16  # of both sizes of a weight: the matrix products need it
CAPABILITIES = {"tensorwise": (8, 9), "rowwise": (9, 0)}  # the oldest GPU of each recipe


def convert_to_float8(model: nn.Module, recipe: str, device: torch.device) -> nn.Module:
    """Converts the layers in place. Raises ConfigError if the GPU or the installed packages cannot multiply in FP8."""
    if (reason := refusal(recipe, device)) is not None:
        raise ConfigError(f"runtime.float8: {reason}; set it to none")
    return replace_linears(model, recipe, emulate=device.type != "cuda")


def replace_linears(model: nn.Module, recipe: str, *, emulate: bool) -> nn.Module:
    """Converts the layers in place for a GPU that can multiply in FP8, or to emulate one."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        cannot = f"{recipe} needs the package torchao, which cannot be imported ({error})"
        raise ConfigError(f"runtime.float8: {cannot}; {how_to_install('float8')}") from error
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    fitting = {name for name, linear in _candidates(model) if not any(size % MULTIPLE for size in linear.weight.shape)}
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in fitting)
    for name in fitting:
        model.get_submodule(name).is_float8 = True  # type: ignore[assignment]
    return model


def refusal(recipe: str, device: torch.device) -> str | None:
    """Why this device cannot multiply in FP8, or None."""
    needed = CAPABILITIES[recipe]
    if device.type != "cuda":
        return f"{recipe} needs a GPU of compute capability {needed[0]}.{needed[1]}, and this run is on {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found < needed:
        name = torch.cuda.get_device_name(device)
        return f"{recipe} needs compute capability {needed[0]}.{needed[1]}, and {name} has {found[0]}.{found[1]}"
    return None


def describe_float8(model: nn.Module) -> str:
    """How many layers are converted, and which could not be."""
    layers = list(_candidates(model))
    kept = [(name, linear) for name, linear in layers if not is_float8(linear)]
    line = f"{len(layers) - len(kept)} linear layers multiply in FP8"
    if not kept:
        return line
    names = dict.fromkeys(".".join(name.split(".")[2:]) for name, _ in kept)  # without blocks.0
    return f"{line}, {len(kept)} do not, since a size is not a multiple of {MULTIPLE}: {', '.join(names)}"


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for path, block in model.named_modules():
        if isinstance(block, DecoderBlock):
            index = block.attention.index_parameters() if isinstance(block.attention, Attention) else []
            left_out = set(map(id, index))
            for name, linear in block.projections():
                if id(linear.weight) not in left_out:
                    yield f"{path}.{name}", linear
