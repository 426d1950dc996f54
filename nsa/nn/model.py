"""The decoder: embedding, blocks, norm, head. It does not depend on devices, processes or files.

Legend: B batch, S tokens, C channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nsa.nn.attention import Attention, build_attention
from nsa.nn.block import DecoderBlock, SwiGLU
from nsa.nn.cache import KVCache, begin
from nsa.nn.cache_step import CacheStep
from nsa.nn.loss import HeadLoss
from nsa.nn.projection import reset_parts
from nsa.ops.dispatch import Backend

if TYPE_CHECKING:  # layers need only torch; the configuration needs pydantic, of the extra `train`
    from nsa.config.architecture import Architecture

# Standard deviation of weights: INIT_GAIN / sqrt(inputs), the usual 0.02 at a width of 768 and more in narrower models.
INIT_GAIN = 0.55
DRAWING_THREADS = 8


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
                SwiGLU(model.dim, model.resolved_mlp_dim(), model.activation),
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
        stds: dict[Tensor, float] = {}
        for block in self.blocks:
            assert isinstance(block, DecoderBlock)
            for _, linear in block.projections():
                is_output = linear in (block.attention.out, block.mlp.out)
                stds[linear.weight] = _std(linear.weight) * ((2 * len(self.blocks)) ** -0.5 if is_output else 1.0)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
        for weight in (self.embedding.weight, self.head.weight):  # one, if the head is tied
            stds[weight] = _std(weight)
        draw_normal(stds)

    def forward(
        self,
        tokens_BS: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: KVCache | CacheStep | None = None,
        loss: HeadLoss | None = None,
        counted: Tensor | None = None,
    ) -> Tensor:
        """`cu_seqlens` marks packed documents (B = 1); `max_seqlen` bounds their length, if known. With a `cache` the
        tokens continue the cached ones, without gradients. With a `loss` the result is `loss(hidden, head)`, which need
        not compute all logits at once. With `counted` [B, S] bool too, the tokens that have a target, the result is
        [3]: the loss, the index loss summed over queries, groups and layers, and the number of its queries."""
        if cache is not None:
            step = begin(cache, self, tokens_BS, cu_seqlens)
            with torch.no_grad():
                cached_BSV: Tensor = self.head(self.hidden(tokens_BS, cache=step))
                return cached_BSV
        hidden_BSC, index_losses = self.run(tokens_BS, cu_seqlens, max_seqlen, counted=counted)
        result: Tensor = self.head(hidden_BSC) if loss is None else loss(hidden_BSC, self.head)
        if counted is None:
            return result
        kl = torch.stack([kl for kl, _ in index_losses]).sum() if index_losses else torch.zeros_like(result)
        # The same in all layers, which have one geometry.
        queries = index_losses[0][1] if index_losses else torch.zeros_like(result)
        return torch.stack([result, kl.to(result.dtype), queries.to(result.dtype)])

    def hidden(
        self,
        tokens_BS: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: CacheStep | None = None,
    ) -> Tensor:
        """The input of the head, [B, S, C], for callers that need the logits of some tokens only."""
        return self.run(tokens_BS, cu_seqlens, max_seqlen, cache)[0]

    def run(
        self,
        tokens_BS: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: CacheStep | None = None,
        counted: Tensor | None = None,
    ) -> tuple[Tensor, list[list[Tensor]]]:
        """The input of the head; with `counted`, also the sum and the queries of each layer's index loss."""
        x_BSC, index_losses = self.embedding(tokens_BS), []
        for block in self.blocks:
            if cache is not None:
                x_BSC = block(x_BSC, cache=cache)
            elif counted is None or not has_index_loss(block):
                x_BSC = block(x_BSC, cu_seqlens, max_seqlen)
            else:
                x_BSC, *index_loss = block(x_BSC, cu_seqlens, max_seqlen, counted=counted)
                index_losses.append(index_loss)
        return self.norm(x_BSC), index_losses

    def num_index_terms(self) -> int:
        """Groups of all layers with an index loss: the summands of the loss per query."""
        blocks: list[Any] = [block for block in self.blocks if has_index_loss(block)]
        return sum(block.attention.num_kv_heads for block in blocks)

    def num_parameters(self, *, trainable_only: bool = False) -> int:
        """The number of parameters; shared ones count once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not trainable_only)


def build_model(config: Architecture, vocab_size: int, seed: int, backend: Backend = None) -> Decoder:
    """A decoder whose weights depend only on the seed; the caller's random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(config, vocab_size, backend)


def has_index_loss(block: Any) -> bool:
    return isinstance(block.attention, Attention) and block.attention.has_index_loss


def _std(weight: Tensor) -> float:
    return float(INIT_GAIN * weight.shape[-1] ** -0.5)


def draw_normal(stds: Mapping[Tensor, float]) -> None:
    """Fills parameters with normal numbers of the given standard deviations.

    One thread draws about 150 million numbers per second, so the weights of a 1B model would take 7 s. On a CPU each
    tensor has its own generator: several threads draw at once, and the numbers do not depend on their order.
    """
    if any(type(weight) is not nn.Parameter or weight.device.type != "cpu" for weight in stds):
        for weight, std in stds.items():
            nn.init.normal_(weight, std=std)
        return
    generators = [torch.Generator().manual_seed(seed) for seed in torch.randint(2**62, (len(stds),)).tolist()]
    with ThreadPoolExecutor(DRAWING_THREADS) as pool:
        for _ in pool.map(nn.init.normal_, stds, repeat(0.0), stds.values(), generators):
            pass  # raises the error of a thread
