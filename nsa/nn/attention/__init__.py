"""Attention layers: one file per kind, a base class, and the registry from names to kinds.

`model.attention` and `model.layer_pattern` name kinds. All other code uses the interface of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from nsa import kinds
from nsa.errors import ArgumentError
from nsa.nn.attention.dense import DenseAttention
from nsa.nn.attention.layer import Attention
from nsa.nn.attention.msa import MSAAttention
from nsa.nn.attention.nsa import NSAAttention
from nsa.nn.attention.window import WindowAttention
from nsa.ops.dispatch import Backend

if TYPE_CHECKING:
    from nsa.config.architecture import Architecture

__all__ = [
    "Attention",
    "DenseAttention",
    "MSAAttention",
    "NSAAttention",
    "WindowAttention",
    "attention_kinds",
    "attention_layers",
    "build_attention",
    "register",
    "sample_layers",
]

Kind = TypeVar("Kind", bound=type[Attention])

_REGISTRY: dict[str, type[Attention]] = {
    "nsa": NSAAttention,
    "msa": MSAAttention,
    "dense": DenseAttention,
    "window": WindowAttention,
}


def register(name: str) -> Callable[[Kind], Kind]:
    """Decorates a subclass of `Attention`, so that configurations can name it in this process."""

    def add(kind: Kind) -> Kind:
        if name in _REGISTRY:
            raise ArgumentError("name", f"{name!r} is already the name of {_REGISTRY[name].__name__}")
        _REGISTRY[name] = kind
        kinds.KINDS.append(name)
        return kind

    return add


def build_attention(kind: str, config: Architecture, backend: Backend = None) -> Attention:
    return _REGISTRY[kind].from_config(config, backend)


def attention_kinds(config: Architecture) -> list[type[Attention]]:
    """The distinct kinds of the layers of a model."""
    return [_REGISTRY[name] for name in dict.fromkeys(config.model.layer_kinds())]


def sample_layers(config: Architecture) -> dict[str, Attention]:
    """One layer of each kind of a model, on meta tensors: for questions about its layers without the model."""
    with torch.device("meta"):
        return {name: build_attention(name, config) for name in dict.fromkeys(config.model.layer_kinds())}


def attention_layers(model: nn.Module) -> Iterator[tuple[str, Attention]]:
    """Every attention layer of a model with its name, found by type: wrappers may change its path."""
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            yield name, module
