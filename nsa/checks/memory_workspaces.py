"""What kernels allocate for themselves while they run, as formulas of their arguments' shapes.

Tracing sees what an operator returns, not what its kernel holds meanwhile. The formulas follow nsa/ops/triton on an
H100 or H200; a test compares them with what the kernels' host code allocates. Those of PyTorch's own attention and of
the reference operators are upper bounds.

Legend: B batch, S tokens, N compressed tokens, H query heads, G key/value heads, n selected blocks, pair = one (b, g).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nsa.ops.layout import num_blocks
from nsa.ops.spec import NSASpec

# cuBLAS on a Hopper keeps 32 MiB for each of the thread of forward, that of backward, and cuBLASLt. Over all recorded
# points 80 to 110 MiB are what no tensor explains. Older cards keep 8 MiB each.
BLAS_BYTES = 3 * (32 << 20)

MULTIPROCESSORS = 132  # other cards have fewer, and cut sums into fewer parts
LARGEST_TABLE = 256 << 20  # of block scores, and of the bits that invert a selection
LONGEST_SUM = 2**17
ROWS_PER_TILE, SPAN, ITEMS_WANTED = 64, 128, 1536
FUSED_MAX_PER_GROUP, FUSED_MAX_HEAD = 7, 128
WEIGHT_PROGRAMS = 512
REFERENCE_SCORES = 1 << 26

_INT32 = _FLOAT32 = 4
_INT64 = 8


def workspace_bytes(func: Any, args: Sequence[Any]) -> float:
    """Bytes that operator `func` holds on top of its arguments and results; 0 for one that needs none."""
    formula = _FORMULAS.get(func.name()) if isinstance(func, torch._ops.OpOverload) else None
    if formula is None:
        return 0.0
    if args[-1] == "reference":  # the backend, last of every operator of nsa
        return _reference(func.name(), args)
    return formula(*args)


def _select(q: Tensor, k: Tensor, lse: Tensor, spec: Sequence[int], cu_seqlens: Tensor | None, *_: Any) -> float:
    """Scores of every block, in one or two planes, for as many queries at once as the table holds."""
    sizes = NSASpec(*spec)
    batch, tokens = q.shape[:2]
    # Without documents the first rows see too few blocks to need scores.
    scored_from = 0 if cu_seqlens is not None else sizes.num_selected * sizes.sel_block
    planes = 1 if sizes.cmp_block == sizes.cmp_stride else 2
    width = -(-num_blocks(tokens, sizes) // 16) * 16
    return min(LARGEST_TABLE, _FLOAT32 * batch * max(0, tokens - scored_from) * k.shape[2] * planes * width)


def _selected(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, spec: Sequence[int], *_: Any) -> float:
    """The blocks that neighbouring queries read, once for tiles of few queries and once for tiles of many; where
    most blocks are read, only the latter."""
    sizes = NSASpec(*spec)
    batch, tokens, groups, chosen = indices.shape
    blocks = num_blocks(tokens, sizes)
    if blocks > 2 * chosen:
        return 2 * _INT64 * indices.numel() + _INT64 * batch * groups * tokens
    queries = max(1, ROWS_PER_TILE * groups // q.shape[2])
    return _INT64 * batch * groups * -(-tokens // queries) * (min(queries * chosen, blocks) + 1)


def _selected_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: Sequence[int],
    cu_seqlens: Tensor | None,
    *_: Any,
) -> float:
    """dQ in float32 where atomics sum it, the queries of every block, first the bits they are found by and then sums of
    dK and dV in parts; for as many pairs at once as the table of bits allows."""
    sizes = NSASpec(*spec)
    batch, tokens, groups, chosen = indices.shape
    blocks = num_blocks(tokens, sizes) + (0 if cu_seqlens is None else cu_seqlens.shape[0])
    table = -(-tokens // SPAN) * blocks * (SPAN // 8 + _INT32)
    pairs = min(batch * groups, max(1, LARGEST_TABLE // table))
    most = pairs * tokens * chosen
    items = max(1, indices.numel() // ITEMS_WANTED)
    chunk = min(max(256, 1 << (items - 1).bit_length()), max(256, 2 * chosen * sizes.sel_block))
    parts = min(pairs * blocks + most // chunk, 2 * most // chunk + 1)
    sums = _FLOAT32 * parts * sizes.sel_block * (q.shape[3] + v.shape[3])
    lists, then = _FLOAT32 * lse.numel() + _INT32 * most, max(pairs * table, sums)
    if q.shape[2] // groups <= FUSED_MAX_PER_GROUP and max(q.shape[3], v.shape[3]) <= FUSED_MAX_HEAD:
        # The result is made at the end, when those are gone.
        return _FLOAT32 * q.numel() + lists + max(0, then - q.numel() * q.element_size())
    tiles = _INT64 * indices.numel()  # as in forward; the lists of few queries stay to the end
    return max(2 * tiles, tiles + lists + then)


def _compressed_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *_: Any) -> float:
    return _flash_backward(q, k, v, lse, q.shape[1], waves=8)


def _window_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: Sequence[int], *_: Any
) -> float:
    return _flash_backward(q, k, v, lse, min(q.shape[1], NSASpec(*spec).window + _keys_per_tile(q, v)), waves=3)


def _flash_backward(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, queries: int, waves: int) -> float:
    """Two numbers a row, and dK and dV in float32 once for every part that their sum over the queries is cut into."""
    tiles = max(1, k.shape[0] * k.shape[2] * -(-k.shape[1] // _keys_per_tile(q, v)))
    rows = queries * q.shape[2] // k.shape[2]
    wanted = min(-(-waves * MULTIPROCESSORS // tiles), rows // ROWS_PER_TILE // 16, 32)
    splits = max(1, wanted, -(-rows // LONGEST_SUM))
    return _FLOAT32 * (2 * lse.numel() + (splits * (k.numel() + v.numel()) if splits > 1 else 0))


def _keys_per_tile(q: Tensor, v: Tensor) -> int:
    return 64 if max(q.shape[3], v.shape[3]) <= 64 else 128


def _contract_backward(dy: Tensor, x: Tensor, weight: Tensor, *_: Any) -> float:
    """The weight's gradient in float32, once for every part that its sum is cut into, and their sum."""
    places, depth, width = weight.shape
    parts = max(1, WEIGHT_PROGRAMS // (places * -(-depth // 128) * -(-width // 64)))
    return _FLOAT32 * (parts + 1) * weight.numel()


def _dense_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> float:
    """dQ in float32, a number a row, and dK and dV for every query head before a group's are added. [B, H, S, D]."""
    per_group = q.shape[1] // k.shape[1]
    grouped = per_group * (k.numel() + v.numel()) * k.element_size() if per_group > 1 else 0
    return _FLOAT32 * (q.numel() + q.numel() // q.shape[3]) + grouped


def _reference(name: str, args: Sequence[Any]) -> float:
    """Compression gathers every block, as it is and in float32. Attention has scores of a chunk of queries with the
    keys they may read, again as mask and exponentials, and in backward their gradients."""
    sizes = NSASpec(*next(argument for argument in args if isinstance(argument, list | tuple)))
    if name.startswith(("nsa::mean", "nsa::contract")):
        gathered = max(argument.numel() for argument in args if isinstance(argument, Tensor))
        return gathered * sizes.cmp_block / sizes.cmp_stride * (2 + _FLOAT32)
    backward = name.endswith("backward")
    q, k = args[1:3] if backward else args[:2]
    rows, keys = q.shape[1], k.shape[1]
    if name.startswith("nsa::window"):
        rows, keys = min(rows, sizes.window), min(keys, 2 * sizes.window)
    scores: int = min(REFERENCE_SCORES, q.shape[0] * q.shape[2] * rows * keys)
    return (3 if backward else 2) * _FLOAT32 * scores


def _nothing(*_: Any) -> float:
    return 0.0


_FORMULAS: dict[str, Callable[..., float]] = {
    "nsa::select_blocks": _select,
    "nsa::selected_attention": _selected,
    "nsa::selected_attention_backward": _selected_backward,
    "nsa::compressed_attention": _nothing,
    "nsa::window_attention": _nothing,
    "nsa::compressed_attention_backward": _compressed_backward,
    "nsa::window_attention_backward": _window_backward,
    "nsa::mean_blocks": _nothing,
    "nsa::mean_blocks_backward": _nothing,
    "nsa::contract_blocks": _nothing,
    "nsa::contract_blocks_backward": _contract_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _dense_backward,
}
