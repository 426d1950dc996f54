"""The shapes of docs/kernels.md, and the inputs that the benchmarks time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.nn.rope import rotate
from nsa.ops import NSASpec, compress_mean


@dataclass(frozen=True)
class Shape:
    batch: int
    tokens: int
    heads: int
    groups: int
    dim: int

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.tokens // 1024}k {self.heads}/{self.groups}/{self.dim}"


SHAPES = [
    Shape(1, 8192, 64, 4, 128),
    Shape(1, 16384, 64, 4, 128),
    Shape(1, 32768, 64, 4, 128),
    Shape(1, 65536, 64, 4, 128),
    Shape(16, 2048, 12, 2, 64),
    Shape(4, 8192, 12, 2, 64),
    Shape(1, 32768, 12, 2, 64),
    Shape(1, 32768, 32, 8, 128),
]

# The best public NSA on an H200, forward and backward in ms, as measured with the same software.
BEST_PUBLIC = {
    "1x8k 64/4/128": ("SFNSA", 3.51, 7.10),
    "1x16k 64/4/128": ("SFNSA", 6.86, 15.1),
    "1x32k 64/4/128": ("SFNSA", 15.4, 34.6),
    "1x64k 64/4/128": ("SFNSA", 39.6, 87.3),
    "16x2k 12/2/64": ("SFNSA", 2.60, 3.95),
    "4x8k 12/2/64": ("SFNSA", 2.49, 4.65),
    "1x32k 12/2/64": ("SFNSA", 3.36, 6.06),
    "1x32k 32/8/128": ("SFNSA", 20.5, 28.9),
}


@dataclass
class Inputs:
    """Leaves of one attention call: queries, three raw key/value pairs, gates. With `slot_turns`, the rotary tables of
    a trained model, compressed keys are rotated after compression; other kinds of input omit this."""

    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor
    slot_turns: tuple[Tensor, Tensor] | None = None

    def all(self) -> list[Tensor]:
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def compressed(self, backend: str | None = None) -> tuple[Tensor, Tensor]:
        """Compressed keys and values."""
        k, v = (compress_mean(x, SPEC, backend=backend) for x in (self.k_cmp, self.v_cmp))
        return k if self.slot_turns is None else rotate(k, self.slot_turns), v


def make_inputs(
    shape: Shape, *, correlated: bool, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", seed: int = 0
) -> Inputs:
    """Normal inputs. Correlated: queries change slowly, in runs of 32 that nearly agree, as in a trained model."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(heads: int, run: int = 1) -> Tensor:
        size = (shape.batch, -(-shape.tokens // run), heads, shape.dim)
        x = torch.randn(size, generator=generator, device=device)
        if run > 1:
            x = x.repeat_interleave(run, dim=1)[:, : shape.tokens]
            x = x + 0.05 * torch.randn(x.shape, generator=generator, device=device)
        return x.to(dtype).requires_grad_()

    gates = torch.rand(shape.batch, shape.tokens, shape.heads, 3, generator=generator, device=device)
    return Inputs(
        draw(shape.heads, 32 if correlated else 1),
        *(draw(shape.groups) for _ in range(6)),
        gates.to(dtype).requires_grad_(),
    )


def agreement(indices: Tensor, spec: NSASpec) -> float:
    """How much neighbouring queries agree: the mean share of a query's selected blocks that the previous query also
    selected. indices [B, S, G, n] as `select_blocks` returns them, of one document. Forced blocks (the first and the
    newest) do not count, nor do queries that see no more blocks than they select. NaN if nothing is left."""
    newest = torch.arange(indices.shape[1], device=indices.device)[:, None, None] // spec.sel_block  # [S, 1, 1]
    free = (indices >= spec.num_init) & (indices <= newest - spec.num_local)
    chosen = torch.where(free, indices, -1)
    common = (chosen[:, 1:, :, :, None] == chosen[:, :-1, :, None, :]).any(-1) & free[:, 1:]
    counts = free[:, 1:].sum(-1)
    counted = (counts > 0) & (newest[1:, :, 0] >= spec.num_selected)
    return float((common.sum(-1) / counts.clamp(min=1))[counted].mean())


SPEC = NSASpec()
