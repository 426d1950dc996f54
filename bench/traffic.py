"""The bytes that context-parallel ranks send for one layer: the formula of docs/long-context.md."""

from dataclasses import dataclass

from nsa.nn.attention.nsa_context import num_chunk_slots
from nsa.ops.spec import NSASpec
from nsa.parallel.context import halo_sources, padded_length


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends for one layer: in forward, and in backward without recomputation. Recomputing the layer
    adds `forward` once more."""

    forward: int
    backward: int


def bytes_per_layer(
    kind: str,
    tokens: int,
    size: int,
    rank: int,
    spec: NSASpec | None,
    *,
    num_kv_heads: int,
    head_dim_k: int,
    head_dim_v: int,
    batch: int = 1,
    itemsize: int = 2,
    gradient_itemsize: int = 4,
    index_dim: int = 0,
) -> Traffic:
    """Bytes that rank `rank` of a group of `size` sends for a layer of `kind` "nsa", "dense" or "window" over `batch`
    sequences of `tokens` tokens, whose keys and values have `itemsize` bytes per number and gradients float32. A layer
    of the kind msa sends as much as a dense one with an `index_dim`, or as a dense one where no query chooses.

    Forward: its raw keys and values (nsa, dense) and its compressed ones (nsa) to all other ranks, and the halos of the
    window (nsa, window) and of compression (nsa) to the ranks with the next chunks. Backward: the gathered tensors
    again, and the gradients of everything in float32. Index keys are gathered in forward only.
    """
    length = padded_length(tokens, size) // (2 * size)
    gathered, widths = 2 * length * (kind != "window"), list[int]()
    if kind in ("nsa", "window"):
        assert spec is not None, "the sizes of nsa and window layers"
        widths.append(spec.window - 1)
        if kind == "nsa":
            gathered += 2 * num_chunk_slots(length, spec)
            widths.append(spec.cmp_block - 1)
    others = [(width, other) for width in widths for other in range(size) if other != rank]
    lent = sum(sent_to(other, rank, length, size, width) for width, other in others)
    borrowed = sum(sent_to(rank, other, length, size, width) for width, other in others)
    numbers = batch * num_kv_heads * (head_dim_k + head_dim_v)
    to_all = (size - 1) * gathered
    index = (size - 1) * batch * 2 * length * index_dim
    return Traffic(
        forward=itemsize * (numbers * (to_all + lent) + index),
        backward=itemsize * numbers * to_all + gradient_itemsize * (numbers * (to_all + borrowed) + index),
    )


def sent_to(receiver: int, sender: int, length: int, size: int, width: int) -> int:
    """Tokens of the halos of `receiver` that `sender` holds."""
    holders, _ = halo_sources(receiver, size, length, width)
    return int((holders == sender).sum())
