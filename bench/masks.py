"""Draws which tokens every query reads with NSA and with MSA: `python -m bench.masks` writes docs/img/msa.svg.

The operators themselves choose the blocks, from random queries and keys that change every few tokens.
"""

from pathlib import Path

import torch
from torch import Tensor

from bench import figures
from nsa.ops import MSASpec, NSASpec, compressed_attention, index_blocks, select_blocks
from nsa.ops.layout import visible_compressed

FIGURE = Path("docs/img/msa.svg")
TOKENS, SIZE, RUN = 96, 16, 6
NSA = NSASpec(cmp_block=8, cmp_stride=4, sel_block=8, num_selected=4, num_init=1, num_local=1, window=12)
MSA = MSASpec(block=16, num_selected=3, num_local=1)
COLOURS = {"compressed": "#b08a0060", "window": figures.COLOURS[2], "selected": figures.COLOURS[0]}


def masks() -> dict[str, dict[str, Tensor]]:
    """For both kinds, [query, token] bool by the way in which the token is read."""
    draw = torch.Generator().manual_seed(1)

    def random(*heads: int) -> Tensor:
        x = torch.randn(1, TOKENS // RUN, *heads, SIZE, generator=draw, dtype=torch.float64)
        return x.repeat_interleave(RUN, dim=1)

    q, k = random(1), random(1)
    k_cmp = k.unfold(1, NSA.cmp_block, NSA.cmp_stride).mean(-1)
    _, lse = compressed_attention(q, k_cmp, k_cmp, NSA)
    t = torch.arange(TOKENS)
    row, column = t[:, None], t[None, :]
    seen = visible_compressed(t, NSA)
    summarized = torch.where(seen > 0, (seen - 1) * NSA.cmp_stride + NSA.cmp_block, 0)  # tokens, from the first on
    nsa = {
        "compressed": column < summarized[:, None],
        "window": (column <= row) & (column > row - NSA.window),
        "selected": _tokens(select_blocks(q, k_cmp, lse, NSA), NSA.sel_block),
    }
    return {"NSA": nsa, "MSA": {"selected": _tokens(index_blocks(random(1), random(), MSA), MSA.block)}}


def _tokens(indices: Tensor, block: int) -> Tensor:
    """The tokens up to each query in its blocks, from indices [1, S, 1, n]."""
    t = torch.arange(TOKENS)
    return (t[None, :, None] // block == indices[0, :, 0, None, :]).any(-1) & (t <= t[:, None])


def draw_figure(path: Path = FIGURE) -> None:
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Patch

    titles = {
        "NSA": f"NSA: {NSA.num_selected} blocks of {NSA.sel_block}, summaries, window",
        "MSA": f"MSA: {MSA.num_selected} blocks of {MSA.block}",
    }
    with figures.figure(path, 1, 2, salt="masks") as drawn:
        for axes, (kind, read) in zip(drawn.axes, masks().items(), strict=True):
            image = torch.zeros(TOKENS, TOKENS, 4)
            for way, mask in read.items():
                image[mask] = torch.tensor(to_rgba(COLOURS[way]))
            axes.imshow(image.numpy(), interpolation="none")
            axes.set(title=titles[kind], xlabel="token that is read")
        drawn.axes[0].set_ylabel("query")
        labels = {"selected": "selected block", "window": "window", "compressed": "summaries only"}
        patches = [Patch(color=COLOURS[way], label=label) for way, label in labels.items()]
        drawn.axes[1].legend(handles=patches, loc="upper right")


if __name__ == "__main__":
    draw_figure()
