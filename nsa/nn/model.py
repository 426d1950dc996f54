"""The decoder: embedding, blocks, norm, head. It does not depend on devices, processes or files.

Legend: B batch, S tokens, C channels, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nsa.nn.attention import build_attention
from nsa.nn.block import DecoderBlock, SwiGLU
from nsa.nn.cache import KVCache, begin
from nsa.nn.cache_step import CacheStep
from nsa.nn.loss import HeadLoss
from nsa.nn.projection import reset_parts
from nsa.ops.dispatch import Backend

if TYPE_CHECKING:  # layers need only torch; the configuration needs pydantic, of the extra `train`
    from nsa.config.schema import Architecture

# Standard deviation of weights: INIT_GAIN / sqrt(inputs), the usual 0.02 at a width of 768 and more in narrower models.
INIT_GAIN = 0.55


class Decoder(nn.Module):
    """A Llama-style language model: tokens [B, S] to logits [B, S, V]."""

    def __init__(self, config: Architecture, vocab_size: int, backend: Backend = None):
        super().__init__()
        model = config.model
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, model.dim)
        self.blocks = nn.ModuleList(
            DecoderBlock(
                model.dim,
                build_attention(kind, config, backend),
                SwiGLU(model.dim, model.resolved_mlp_dim()),
                model.norm_eps,
            )
            for kind in model.layer_kinds()
        )
        self.norm = nn.RMSNorm(model.dim, eps=model.norm_eps)
        self.head = nn.Linear(model.dim, vocab_size, bias=False)
        if model.tied_head:
            self.head.weight = self.embedding.weight
        self._draw_weights()

    def reset_parameters(self) -> None:
        """Initialises all parameters as the constructor does, also after `to_empty`. Resetting submodules afterwards
        would undo it with PyTorch's defaults; `model.apply` calls the decoder last."""
        reset_parts(self)
        self._draw_weights()

    def _draw_weights(self) -> None:
        """Draws normal weights; projections into the residual stream are scaled down by the depth.

        Gates and compressors keep their own initialisation.
        """
        for block in self.blocks:
            assert isinstance(block, DecoderBlock)
            for branch in (block.attention, block.mlp):
                own = [part for part in branch.children() if isinstance(part, nn.Linear | nn.ModuleList)]
                for linear in (m for part in own for m in part.modules() if isinstance(m, nn.Linear)):
                    _init(linear.weight, (2 * len(self.blocks)) ** -0.5 if linear is branch.out else 1.0)
                    if linear.bias is not None:
                        nn.init.zeros_(linear.bias)
        _init(self.embedding.weight)
        _init(self.head.weight)

    def forward(
        self,
        tokens_BS: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: KVCache | CacheStep | None = None,
        loss: HeadLoss | None = None,
    ) -> Tensor:
        """`cu_seqlens` marks packed documents (B = 1); `max_seqlen` bounds their length, if known. With a `cache` the
        tokens continue the cached ones, without gradients. With a `loss` the result is `loss(hidden, head)`, which need
        not compute all logits at once."""
        if cache is not None:
            step = begin(cache, self, tokens_BS, cu_seqlens)
            with torch.no_grad():
                cached_BSV: Tensor = self.head(self.hidden(tokens_BS, cache=step))
                return cached_BSV
        hidden_BSC = self.hidden(tokens_BS, cu_seqlens, max_seqlen)
        result: Tensor = self.head(hidden_BSC) if loss is None else loss(hidden_BSC, self.head)
        return result

    def hidden(
        self,
        tokens_BS: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: CacheStep | None = None,
    ) -> Tensor:
        """The input of the head, [B, S, C], for callers that need the logits of some tokens only."""
        x_BSC = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSC = block(x_BSC, cu_seqlens, max_seqlen) if cache is None else block(x_BSC, cache=cache)
        y_BSC: Tensor = self.norm(x_BSC)
        return y_BSC

    def num_parameters(self, *, trainable_only: bool = False) -> int:
        """The number of parameters; shared ones count once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not trainable_only)


def build_model(config: Architecture, vocab_size: int, seed: int, backend: Backend = None) -> Decoder:
    """A decoder whose weights depend only on the seed; the caller's random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(config, vocab_size, backend)


def _init(weight: Tensor, scale: float = 1.0) -> None:
    nn.init.normal_(weight, std=scale * INIT_GAIN * weight.shape[-1] ** -0.5)
