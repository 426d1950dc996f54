"""The operators of Native Sparse Attention on tensors.

Shapes: B batch, S tokens, H query heads, G key/value heads (H is a multiple of G), N compressed tokens, Dk and Dv head
sizes, multiples of 16 from 16 to 256. Queries, keys and values of a call have one float type of 16, 32 or 64 bits, and
all tensors one device. First derivatives only, by `.backward()` or `torch.autograd.grad`: a second derivative and
forward mode (`torch.func.jvp`, `jacfwd`, `hessian`, `forward_ad`) raise DerivativeError.

spec         NSASpec, the sizes of blocks, selection and window
cu_seqlens   None, or the borders of documents packed into one sequence, for B = 1: int32 [documents + 1] on the device
             of the others, from 0 to S, never decreasing. No document reads another. On a GPU, pass `.clone()` of a
             buffer that a collective or code outside torch fills: such a write is not noticed there
q_offset     tokens before the first query: the S queries are the last of a sequence of q_offset + S tokens, whose keys,
             values and borders are given whole
backend      None runs the fastest backend that can; "reference" or "triton" runs that one or raises BackendError

Names are loaded on first use, so that `nsa.ops.spec` can be imported without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nsa.ops.spec import NSASpec

if TYPE_CHECKING:
    from nsa.ops.decode import PagedKV, RingKV, nsa_decode, paged_attention
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
    "PagedKV",
    "RingKV",
    "checked_values",
    "compress_contract",
    "compress_mean",
    "compressed_attention",
    "nsa_attention",
    "nsa_decode",
    "paged_attention",
    "select_blocks",
    "selected_attention",
    "window_attention",
]

_MODULES = {"checked_values": "library"} | dict.fromkeys(
    ("PagedKV", "RingKV", "nsa_decode", "paged_attention"), "decode"
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"nsa.ops.{_MODULES.get(name, 'operators')}"), name)
