"""Attention layers: a file for each kind, a base, and the registry from name to kind.

`model.attention` and `model.layer_pattern` name kinds. Everything else asks the layers, never their kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from nsa import kinds
from nsa.errors import ArgumentError
from nsa.nn.attention.dense import DenseAttention
from nsa.nn.attention.layer import Attention
from nsa.nn.attention.nsa import NSAAttention
from nsa.nn.attention.window import WindowAttention
from nsa.ops.dispatch import Backend

if TYPE_CHECKING:
    from nsa.config.schema import Architecture

__all__ = [
    "Attention",
    "DenseAttention",
    "NSAAttention",
    "WindowAttention",
    "attention_kinds",
    "attention_layers",
    "build_attention",
    "register",
]

Kind = TypeVar("Kind", bound=type[Attention])

_REGISTRY: dict[str, type[Attention]] = {}


def register(name: str) -> Callable[[Kind], Kind]:
    """Decorates a subclass of `Attention`: a configuration may name it from then on, in this process."""

    def add(kind: Kind) -> Kind:
        if name in _REGISTRY:
            raise ArgumentError("name", f"{name!r} is the name of {_REGISTRY[name].__name__} already")
        _REGISTRY[name] = kind
        if name not in kinds.KINDS:
            kinds.KINDS.append(name)
        return kind

    return add


register("nsa")(NSAAttention)
register("dense")(DenseAttention)
register("window")(WindowAttention)


def build_attention(kind: str, config: Architecture, backend: Backend = None) -> Attention:
    return _REGISTRY[kind].from_config(config, backend)


def attention_kinds(config: Architecture) -> list[type[Attention]]:
    """The kinds that the layers of a model have, each once."""
    return [_REGISTRY[name] for name in dict.fromkeys(config.model.layer_kinds())]


def attention_layers(model: nn.Module) -> Iterator[tuple[str, Attention]]:
    """Every attention layer of a model with its name, whatever wraps it: found by type, never by path."""
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            yield name, module
