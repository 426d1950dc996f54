"""Inputs that the operator tests share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.ops import NSASpec

# Small sizes with which a short sequence really selects: more visible blocks than num_selected.
SMALL = NSASpec(cmp_block=4, cmp_stride=2, sel_block=4, num_selected=3, num_init=1, num_local=1, window=5)


def slots(tokens: int, spec: NSASpec, packed: bool) -> int:
    return tokens // spec.cmp_stride if packed else max(0, (tokens - spec.cmp_block) // spec.cmp_stride + 1)


@dataclass
class Inputs:
    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor
    cu_seqlens: Tensor | None

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.q, self.k_cmp, self.v_cmp, self.k_sel, self.v_sel, self.k_win, self.v_win, self.gates)


def make_inputs(
    tokens: int,
    *,
    spec: NSASpec = SMALL,
    batch: int = 1,
    heads: int = 2,
    groups: int = 1,
    dk: int = 16,
    dv: int = 16,
    cu_seqlens: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
    requires_grad: bool = False,
    seed: int = 0,
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        return drawn.requires_grad_(requires_grad)

    compressed = slots(tokens, spec, cu_seqlens is not None)
    return Inputs(
        q=draw(batch, tokens, heads, dk),
        k_cmp=draw(batch, compressed, groups, dk),
        v_cmp=draw(batch, compressed, groups, dv),
        k_sel=draw(batch, tokens, groups, dk),
        v_sel=draw(batch, tokens, groups, dv),
        k_win=draw(batch, tokens, groups, dk),
        v_win=draw(batch, tokens, groups, dv),
        gates=draw(batch, tokens, heads, 3),
        cu_seqlens=None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32),
    )
