"""The operators of Native Sparse Attention on tensors.

Names are loaded on first use, so that `nsa.ops.spec` can be imported without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nsa.ops.spec import NSASpec

if TYPE_CHECKING:
    from nsa.ops.library import checked_values
    from nsa.ops.operators import (
        compress_contract,
        compress_mean,
        compressed_attention,
        nsa_attention,
        select_blocks,
        selected_attention,
        window_attention,
    )

__all__ = [
    "NSASpec",
    "checked_values",
    "compress_contract",
    "compress_mean",
    "compressed_attention",
    "nsa_attention",
    "select_blocks",
    "selected_attention",
    "window_attention",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("nsa.ops.library" if name == "checked_values" else "nsa.ops.operators"), name)
