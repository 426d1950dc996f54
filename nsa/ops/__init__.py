"""The operators of Native Sparse Attention, and of MSA, on tensors.

Shapes: B batch, S tokens, H query heads, G key/value heads (H is a multiple of G), N compressed tokens, Dk and Dv head
sizes, multiples of 16 from 16 to 256. Queries, keys and values of a call have one float type of 16, 32 or 64 bits, and
all tensors one device. First derivatives only, by `.backward()` or `torch.autograd.grad`: a second derivative and
forward mode (`torch.func.jvp`, `jacfwd`, `hessian`, `forward_ad`) raise DerivativeError, and so do `torch.func.grad`,
`vjp` and `jacrev`. `torch.vmap` computes the samples one after the other.

spec         NSASpec, the sizes of blocks, selection and window; of MSA's operators, MSASpec
cu_seqlens   None, or the borders of documents packed into one sequence, for B = 1: int32 [documents + 1] on the device
             of the others, from 0 to S, never decreasing. No document reads another. On a GPU, pass `.clone()` of a
             buffer that a collective or code outside torch fills: such a write is not detected there
q_offset     tokens before the first query: the S queries are the last tokens of a sequence of q_offset + S tokens;
             keys, values and borders are those of the whole sequence
backend      None runs the fastest backend that can; "reference" or "triton" runs that one or raises BackendError

Names are loaded on first use, so that `nsa.ops.spec` can be imported without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nsa.ops.spec import MSASpec, NSASpec

if TYPE_CHECKING:
    from nsa.ops.block_index import index_blocks, msa_attention
    from nsa.ops.branches import compressed_attention, select_blocks, selected_attention, window_attention
    from nsa.ops.compression import compress_contract, compress_mean
    from nsa.ops.decoding import PagedKV, RingKV, msa_decode, nsa_decode, paged_attention
    from nsa.ops.library import checked_values
    from nsa.ops.mixing import nsa_attention

__all__ = [
    "MSASpec",
    "NSASpec",
    "PagedKV",
    "RingKV",
    "checked_values",
    "compress_contract",
    "compress_mean",
    "compressed_attention",
    "index_blocks",
    "msa_attention",
    "msa_decode",
    "nsa_attention",
    "nsa_decode",
    "paged_attention",
    "select_blocks",
    "selected_attention",
    "window_attention",
]

_MODULES = {
    "block_index": ("index_blocks", "msa_attention"),
    "branches": ("compressed_attention", "select_blocks", "selected_attention", "window_attention"),
    "compression": ("compress_contract", "compress_mean"),
    "decoding": ("PagedKV", "RingKV", "msa_decode", "nsa_decode", "paged_attention"),
    "library": ("checked_values",),
    "mixing": ("nsa_attention",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"nsa.ops.{_MODULE_OF[name]}"), name)
