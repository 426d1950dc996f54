"""The exported model in plain PyTorch, for transformers with `trust_remote_code=True`.

`nsa export` copies this file into the folder of a model, as modeling_nsa.py. It imports only torch and transformers.
Where the package nsa is installed, its classes replace the classes below: they are faster, need less memory and train.
This file is for inference. Autograd gives gradients of a loss, but the index of MSA has no index loss here.

The cache keeps the keys and values of all tokens; decoding gives the same results as a pass over the whole sequence.
Rows of a batch may be padded on either side: positions, blocks and windows count from the first token.

Legend: B batch, S new tokens, T tokens so far, R queries of a chunk, N compressed tokens, J blocks, C channels, H query
heads, G key/value heads, h = H / G, K/V head sizes.
"""

# mypy: disable-error-code="no-any-return"

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

QUERIES = 128  # scores exist for this many queries at a time
NOT_SUPPORTED = ("output_attentions", "output_hidden_states", "inputs_embeds", "cu_seq_lens_q", "seq_idx")
Tables = tuple[Tensor, Tensor]


class NSALMConfig(PreTrainedConfig):
    """`model`, `nsa` and `msa` are the sections of the configuration that the model was trained with."""

    model_type = "nsa"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (transformers adds a list to it)

    def __init__(self, vocab_size: int = 256, package: str | None = None, **options: Any):
        self.vocab_size, self.package = vocab_size, package  # package: its address for pip
        self.model, self.nsa, self.msa = (options.pop(name, {}) for name in ("model", "nsa", "msa"))
        super().__init__(**options | {"tie_word_embeddings": self.model.get("tied_head", False)})


class Step(NamedTuple):
    """The tokens of a forward pass."""

    position: Tensor  # [B, S], of the new tokens in their sequences
    tables: Tables  # cos and sin of these positions
    order: Tensor | None  # [B, T], the columns of every row with padding last; None without padding
    cache: DynamicCache | None  # keys and values of earlier tokens

    def extend(self, layer: int, *new: list[Tensor]) -> list[list[Tensor]]:
        """Keys and values [B, T, heads, size] of all tokens, padding last, from those [B, S, heads, size] of new ones.
        The cache has one head per layer, which holds all heads of all its keys or values."""
        keys, values = (torch.cat([x.flatten(2) for x in kind], -1).unsqueeze(1) for kind in new)
        if self.cache is not None:
            keys, values = self.cache.update(keys, values, layer)
        found = []
        for kind, joined in zip(new, (keys.squeeze(1), values.squeeze(1)), strict=True):
            if self.order is not None:
                joined = joined.gather(1, self.order.unsqueeze(-1).expand(-1, -1, joined.shape[-1]))
            parts = joined.split([x.shape[2] * x.shape[3] for x in kind], -1)
            found.append([part.unflatten(-1, x.shape[2:]) for part, x in zip(parts, kind, strict=True)])
        return found


def rotary_tables(position: Tensor, model: SimpleNamespace) -> Tables:
    """cos and sin [..., rotary_dim / 2] in float32."""
    rotary_dim = model.rotary_dim or model.head_dim_k
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=position.device) / rotary_dim
    frequency = model.rope_base**-exponent
    if model.rope_scaling is not None:
        scaling = SimpleNamespace(**model.rope_scaling)
        if scaling.original_length is None:
            frequency = frequency / scaling.factor
        else:  # Llama 3.1: high frequencies are kept, low ones divided, those between interpolated
            turns = frequency * scaling.original_length / (2 * math.pi)
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            kept = kept.clamp(0.0, 1.0)
            frequency = frequency * (kept + (1.0 - kept) / scaling.factor)
    angle = position.to(torch.float32).unsqueeze(-1) * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """Rotates the first channels of heads [..., heads, size], as many as the tables are for, in half-split pairs."""
    cos, sin = (table.unsqueeze(-2) for table in tables)
    half = cos.shape[-1]
    low, high, rest = widened(x).split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1).to(x.dtype)


def widened(x: Tensor) -> Tensor:
    """x at least in float32, in which softmax and reductions are computed."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """q [B,R,H,K], k [B,N,G,K], v [B,N,G,V], visible broadcastable to [B,G,h,R,N] -> o [B,R,H,V] and the probabilities
    [B,G,h,R,N]. A query that sees nothing gets 0."""
    q_BRGhK = widened(q).unflatten(2, (k.shape[2], -1)) * q.shape[-1] ** -0.5
    scores = torch.einsum("brghk,bngk->bghrn", q_BRGhK, widened(k)).masked_fill(~visible, -torch.inf)
    p = scores.softmax(-1).masked_fill(~visible, 0.0)
    return torch.einsum("bghrn,bngv->brghv", p, widened(v)).flatten(2, 3).to(q.dtype), p


def chosen_tokens(scores: Tensor, position: Tensor, block: int, sizes: SimpleNamespace, tokens: int) -> Tensor:
    """Block scores [B,G,R,J] -> the tokens of the chosen blocks up to the query, [B,G,1,R,T] bool: forced blocks, then
    the highest scores, of equal ones the lower block."""
    number = torch.arange(scores.shape[-1], device=scores.device)
    own = (position // block)[:, None, :, None]
    forced = (number < sizes.num_init) | (number > own - sizes.num_local)
    scores = scores.masked_fill(forced, torch.inf).masked_fill(number > own, -torch.inf)
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., : sizes.num_selected]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    return chosen.repeat_interleave(block, -1)[..., :tokens].unsqueeze(2) & causal(position, tokens)


def causal(position: Tensor, tokens: int, window: int | None = None) -> Tensor:
    """[B,1,1,R,T] bool: the tokens up to the query, or the last `window` of them."""
    age = position[:, None, None, :, None] - torch.arange(tokens, device=position.device)
    return (age >= 0) if window is None else (age >= 0) & (age < window)


class DenseAttention(nn.Module):
    """Causal attention over all tokens or the last `window`, and the base of the other kinds."""

    window: int | None = None

    def __init__(self, config: NSALMConfig, layer: int):
        super().__init__()
        self.model, self.layer = SimpleNamespace(**config.model), layer
        m = self.model
        self.q, self.q_norm = self.linear(m.n_heads, m.head_dim_k), self.norm(m.head_dim_k)
        self.k: Any = self.linear(m.n_kv_heads, m.head_dim_k)
        self.v: Any = self.linear(m.n_kv_heads, m.head_dim_v)
        self.k_norm: Any = self.norm(m.head_dim_k)
        self.out = nn.Linear(m.n_heads * m.head_dim_v, m.dim, bias=False)

    def linear(self, heads: int, size: int) -> nn.Module:
        return nn.Linear(self.model.dim, heads * size, bias=self.model.qkv_bias)

    def norm(self, size: int) -> nn.Module:
        return nn.RMSNorm(size, eps=self.model.norm_eps) if self.model.qk_norm else nn.Identity()

    def heads(self, x: Tensor, linear: nn.Module, norm: nn.Module | None, count: int) -> Tensor:
        projected = linear(x).unflatten(-1, (count, -1))
        return projected if norm is None else norm(projected).to(projected.dtype)

    def forward(self, x_BSC: Tensor, step: Step) -> Tensor:
        queries, keys, values = self.read(x_BSC, step.tables)
        keys, values = self.prepare(*step.extend(self.layer, keys, values))
        chunks = zip(*(x.split(QUERIES, 1) for x in (step.position, *queries)), strict=True)
        attended = [self.attend(chunk, keys, values, position) for position, *chunk in chunks]
        return self.out(torch.cat(attended, 1).flatten(2))

    def read(self, x_BSC: Tensor, tables: Tables) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """What attention takes per query, and keys and values as the cache keeps them, all [B, S, heads, size]."""
        q = self.heads(x_BSC, self.q, self.q_norm, self.model.n_heads)
        k = self.heads(x_BSC, self.k, self.k_norm, self.model.n_kv_heads)
        return [rotate(q, tables)], [rotate(k, tables)], [self.heads(x_BSC, self.v, None, self.model.n_kv_heads)]

    def prepare(self, keys: list[Tensor], values: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values as `attend` takes them, from those of all tokens."""
        return keys, values

    def attend(self, queries: list[Tensor], keys: list[Tensor], values: list[Tensor], position: Tensor) -> Tensor:
        """[B, R, H, V] for queries at `position` [B, R]."""
        return attend(queries[0], keys[0], values[0], causal(position, keys[0].shape[1], self.window))[0]


class MSAAttention(DenseAttention):
    """Attention over the blocks in which an index key has the highest product with the index query of the group."""

    def __init__(self, config: NSALMConfig, layer: int):
        super().__init__(config, layer)
        self.msa = SimpleNamespace(**config.msa)
        size = self.msa.index_dim or self.model.head_dim_k
        self.index_q, self.index_q_norm = self.linear(self.model.n_kv_heads, size), self.norm(size)
        self.index_k, self.index_k_norm = self.linear(1, size), self.norm(size)

    def read(self, x_BSC: Tensor, tables: Tables) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        queries, keys, values = super().read(x_BSC, tables)
        index_q = self.heads(x_BSC, self.index_q, self.index_q_norm, self.model.n_kv_heads)
        index_k = self.heads(x_BSC, self.index_k, self.index_k_norm, 1)
        cos, sin = (table[..., : index_k.shape[-1] // 2] for table in tables)  # an index head may be the smaller one
        return [*queries, rotate(index_q, (cos, sin))], [*keys, rotate(index_k, (cos, sin))], values

    def attend(self, queries: list[Tensor], keys: list[Tensor], values: list[Tensor], position: Tensor) -> Tensor:
        (q, index_q), (k, index_k) = queries, keys
        tokens, block = k.shape[1], self.msa.block
        scores = torch.einsum("brge,bte->bgrt", widened(index_q), widened(index_k.squeeze(2)))
        scores = scores.masked_fill(~causal(position, tokens).squeeze(2), -torch.inf)
        scores = pad(scores, (0, -tokens % block), value=-torch.inf).unflatten(-1, (-1, block)).amax(-1)
        return attend(q, k, values[0], chosen_tokens(scores, position, block, self.msa, tokens))[0]


class Compressor(nn.Module):
    """phi: every block of keys or values becomes one token, by its mean, an MLP, or the sum of both."""

    def __init__(self, nsa: SimpleNamespace, size: int):
        super().__init__()
        self.phi, self.block, self.stride = nsa.phi, nsa.cmp_block, nsa.cmp_stride
        if self.phi != "mean":
            self.place = nn.Parameter(torch.zeros(self.block, size))
            self.weight = nn.Parameter(torch.zeros(self.block, size, size))
            self.bias = nn.Parameter(torch.zeros(size))
            self.out = nn.Linear(size, size)

    def forward(self, x_BTGD: Tensor) -> Tensor:
        """[B, T, G, size] -> [B, N, G, size]."""
        if x_BTGD.shape[1] < self.block:
            return x_BTGD[:, :0]
        blocks = x_BTGD.unfold(1, self.block, self.stride).transpose(-1, -2)  # [B, N, G, cmp_block, size]
        mean = widened(blocks).mean(-2).to(x_BTGD.dtype)
        if self.phi == "mean":
            return mean
        hidden = (blocks + self.place).flatten(-2) @ self.weight.flatten(0, 1) + self.bias
        mlp = self.out(silu(hidden))
        return mlp if self.phi == "mlp" else mean + mlp


class NSAAttention(DenseAttention):
    """Native Sparse Attention: compressed, selected and window branches, mixed by gates.

    Projections of keys and values are in the order cmp, sel, win; there is one if the branches share it."""

    def __init__(self, config: NSALMConfig, layer: int):
        super().__init__(config, layer)
        self.nsa, m = SimpleNamespace(**config.nsa), self.model
        pairs = range(1 if self.nsa.shared_kv else 3)
        self.k = nn.ModuleList(self.linear(m.n_kv_heads, m.head_dim_k) for _ in pairs)
        self.v = nn.ModuleList(self.linear(m.n_kv_heads, m.head_dim_v) for _ in pairs)
        self.k_norm = nn.ModuleList(self.norm(m.head_dim_k) for _ in pairs)
        self.phi_k, self.phi_v = Compressor(self.nsa, m.head_dim_k), Compressor(self.nsa, m.head_dim_v)
        width = max(32, m.dim // 8)
        self.gate = nn.ModuleDict({"hidden": nn.Linear(m.dim, width), "out": nn.Linear(width, 3 * m.n_heads)})

    def read(self, x_BSC: Tensor, tables: Tables) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        groups = self.model.n_kv_heads
        q = self.heads(x_BSC, self.q, self.q_norm, self.model.n_heads)
        raw = [self.heads(x_BSC, linear, norm, groups) for linear, norm in zip(self.k, self.k_norm, strict=True)]
        values = [self.heads(x_BSC, linear, None, groups) for linear in self.v]
        k_cmp = raw[0] if self.nsa.compress == "before_rotation" else rotate(raw[0], tables)
        others = [rotate(k, tables) for k in (raw if self.nsa.shared_kv else raw[1:])]
        logits = self.gate["out"](silu(self.gate["hidden"](x_BSC))).unflatten(-1, (-1, 3))
        gates = logits.sigmoid() if self.nsa.gate == "sigmoid" else logits.softmax(-1)
        return [rotate(q, tables), gates], [k_cmp, *others], values

    def prepare(self, keys: list[Tensor], values: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        if self.nsa.shared_kv:
            keys, values = [*keys, keys[1]], values * 3
        k_cmp, v_cmp = self.phi_k(keys[0]), self.phi_v(values[0])
        if self.nsa.compress == "before_rotation":
            first = self.nsa.cmp_stride * torch.arange(k_cmp.shape[1], device=k_cmp.device)
            k_cmp = rotate(k_cmp, rotary_tables(first, self.model))
        return [k_cmp, *keys[1:]], [v_cmp, *values[1:]]

    def attend(self, queries: list[Tensor], keys: list[Tensor], values: list[Tensor], position: Tensor) -> Tensor:
        (q, gates), (k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win) = queries, keys, values
        tokens, nsa = k_sel.shape[1], self.nsa
        last = nsa.cmp_stride * torch.arange(k_cmp.shape[1], device=q.device) + nsa.cmp_block - 1
        o_cmp, p = attend(q, k_cmp, v_cmp, last <= position[:, None, None, :, None])
        visible = chosen_tokens(self.importance(p.sum(2), tokens), position, nsa.sel_block, nsa, tokens)
        o_sel, _ = attend(q, k_sel, v_sel, visible)
        o_win, _ = attend(q, k_win, v_win, causal(position, tokens, nsa.window))
        if nsa.force_branch is not None:
            return {"cmp": o_cmp, "sel": o_sel, "win": o_win}[nsa.force_branch]
        mixed = (widened(torch.stack([o_cmp, o_sel, o_win], -1)) * widened(gates).unsqueeze(-2)).sum(-1)
        return mixed.to(q.dtype)

    def importance(self, p: Tensor, tokens: int) -> Tensor:
        """Probabilities [B,G,R,N] of compressed tokens -> scores [B,G,R,J] of selection blocks (Eq. 9): a compressed
        token counts once for every chunk of cmp_stride tokens that it shares with the block."""
        per_token, per_block = self.nsa.cmp_block // self.nsa.cmp_stride, self.nsa.sel_block // self.nsa.cmp_stride
        chunks = -(-tokens // self.nsa.sel_block) * per_block
        p = pad(p, (per_token - 1, chunks - p.shape[-1]))
        # Chunk c lies in compressed tokens c - per_token + 1 to c.
        shares = torch.stack([p[..., offset : offset + chunks] for offset in range(per_token)]).sum(0)
        return shares.unflatten(-1, (-1, per_block)).sum(-1)


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int, activation: str):
        super().__init__()
        self.activation = activation
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.out = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BSC: Tensor) -> Tensor:
        gate, up = self.gate(x_BSC), self.up(x_BSC)
        if self.activation == "swiglu":
            return self.out(silu(gate) * up)
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return self.out((up + 1.0) * gate * torch.sigmoid(1.702 * gate))


class DecoderBlock(nn.Module):
    def __init__(self, config: NSALMConfig, layer: int, kind: str):
        super().__init__()
        m = SimpleNamespace(**config.model)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(m.dim, eps=m.norm_eps), nn.RMSNorm(m.dim, eps=m.norm_eps)
        kinds = {"nsa": NSAAttention, "msa": MSAAttention, "dense": DenseAttention, "window": DenseAttention}
        if kind not in kinds:
            raise ValueError(f"config.json: attention of kind {kind!r} needs the package that defines it")
        self.attention = kinds[kind](config, layer)
        self.attention.window = config.nsa["window"] if kind == "window" else None
        self.mlp = MLP(m.dim, m.mlp_dim or -(-(8 * m.dim // 3) // 64) * 64, m.activation)

    def forward(self, x_BSC: Tensor, step: Step) -> Tensor:
        x_BSC = x_BSC + self.attention(self.attention_norm(x_BSC), step)
        return x_BSC + self.mlp(self.mlp_norm(x_BSC))


class Decoder(nn.Module):
    def __init__(self, config: NSALMConfig):
        super().__init__()
        m = SimpleNamespace(**config.model)
        pattern = m.layer_pattern or [m.attention]
        kinds = [pattern[layer % len(pattern)] for layer in range(m.n_layers)]
        self.embedding = nn.Embedding(config.vocab_size, m.dim)
        self.blocks = nn.ModuleList(DecoderBlock(config, layer, kind) for layer, kind in enumerate(kinds))
        self.norm = nn.RMSNorm(m.dim, eps=m.norm_eps)
        self.head = nn.Linear(m.dim, config.vocab_size, bias=False)


class NSAForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder as a causal language model; beam search, sampling and assisted decoding use transformers' cache."""

    config_class = NSALMConfig
    base_model_prefix = "decoder"
    _no_split_modules = ["DecoderBlock"]  # noqa: RUF012  (read by transformers)
    _tied_weights_keys = {"decoder.head.weight": "decoder.embedding.weight"}  # noqa: RUF012  (read by transformers)

    def __init__(self, config: NSALMConfig):
        super().__init__(config)
        how = f"pip install 'nsa[hf] @ {config.package}'" if config.package else "the model card says how to install it"
        logging.get_logger(__name__).warning_once(
            f"The package nsa is not installed; its substitute is slower and trains no index of MSA: {how}."
        )
        self.decoder = Decoder(config)
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder.head

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """attention_mask [B, past and new tokens]: 1 for tokens, 0 for padding. Positions follow from the mask."""
        for name in NOT_SUPPORTED:
            if options.get(name) is not None and options[name] is not False:
                raise ValueError(f"{name} is not supported without the package nsa")
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None and type(past_key_values) is not DynamicCache:
            raise ValueError(f"past_key_values must be a DynamicCache, got {type(past_key_values).__name__}")
        known = 0 if past_key_values is None else past_key_values.get_seq_length()
        wanted = [len(input_ids), known + input_ids.shape[1]]
        mask = (input_ids.new_ones(wanted) if attention_mask is None else attention_mask).bool()
        if list(mask.shape) != wanted:
            raise ValueError(f"attention_mask must be {wanted}, batch and tokens, got {list(mask.shape)}")
        is_padded = not bool(mask.all())
        if is_padded and (mask[:, :known].any(1) & ~mask[:, known:].any(1)).any():
            raise ValueError("attention_mask has a row without a new token; with prefill_chunk_size, pad on the left")
        if position_ids is not None and ((position_ids.diff() != 1) & mask[:, known + 1 :] & mask[:, known:-1]).any():
            raise ValueError("position_ids of packed documents are not supported without the package nsa")
        position = (mask.cumsum(1) - 1).clamp(min=0)[:, known:]
        order = torch.argsort(~mask, dim=1, stable=True) if is_padded else None
        step = Step(position, rotary_tables(position, SimpleNamespace(**self.config.model)), order, past_key_values)
        x_BSC = self.decoder.embedding(input_ids)
        for block in self.decoder.blocks:
            x_BSC = block(x_BSC, step)
        if is_padded:  # padding gets the output of the token before it: generate() reads the last column
            latest = (torch.arange(input_ids.shape[1], device=mask.device) * mask[:, known:]).cummax(1).values
            x_BSC = x_BSC.gather(1, latest.unsqueeze(-1).expand_as(x_BSC))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BSV = self.decoder.head(self.decoder.norm(x_BSC)[:, kept])
        loss = None if labels is None else self.loss_function(logits_BSV, labels, self.config.vocab_size, **options)
        return CausalLMOutputWithPast(loss=loss, logits=logits_BSV, past_key_values=past_key_values)


# transformers asks users to install what is imported outside a try block; the public package nsa is another project.
try:  # noqa: SIM105
    from nsa.hf import NSAForCausalLM, NSALMConfig  # type: ignore[assignment]  # noqa: F401
except ImportError:
    pass
