"""One rank of a group that computes layers over divided sequences, and compares them with the layers over whole ones.

`python -m tests.distributed.context_worker`; it fails where they differ.
"""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist

from bench.traffic import bytes_per_layer
from nsa.nn.attention import DenseAttention, MSAAttention, NSAAttention, WindowAttention
from nsa.ops import MSASpec, NSASpec
from nsa.parallel.context import Context
from nsa.parallel.transform import divide_sequences

SPEC = NSASpec(cmp_block=6, cmp_stride=3, sel_block=6, num_selected=4, num_init=1, num_local=1, window=11)
SIZES = (32, 4, 2, 16, 32)


def warming_up(layer):
    layer.is_dense = True
    return layer


def freezing_queries(layer):
    layer.index_q.requires_grad_(requires_grad=False)
    return layer


nsa = partial(NSAAttention, *SIZES, SPEC)
LAYERS = {
    "mean": lambda: nsa(),
    "mlp": lambda: nsa(phi="mlp", qk_norm=True, gate="softmax", rotary_dim=8),
    "mean_mlp": lambda: nsa(phi="mean_mlp", compress="after_rotation"),
    "shared": lambda: nsa(shared_kv=True, compress="after_rotation"),
    "cmp": lambda: nsa(phi="mlp", force_branch="cmp"),
    "sel": lambda: nsa(force_branch="sel"),
    "win": lambda: nsa(force_branch="win"),
    "msa": lambda: MSAAttention(*SIZES, MSASpec(16, 2), index_dim=32, qk_norm=True),
    "warmup": lambda: warming_up(MSAAttention(*SIZES, MSASpec(16, 2))),
    "keys": lambda: freezing_queries(MSAAttention(*SIZES, MSASpec(16, 2), qkv_bias=True)),
    "dense": lambda: DenseAttention(*SIZES, qk_norm=True, rotary_dim=8),
    "window": lambda: WindowAttention(*SIZES, window=9, qkv_bias=True),
}
SEQUENCES = (
    (2, 96, None),
    (1, 101, None),
    (1, 13, None),  # chunks shorter than halos
    (1, 101, [0, 1, 1, 30, 33, 47, 90, 101]),
    (1, 96, [0, 41, 96]),
    (1, 96, [0, 19, 24, 24, 48, 53, 72, 95, 96]),
)


class Counted:
    """Bytes that this rank sends to others, by what torch.distributed is called with."""

    def __init__(self, size, rank):
        self.bytes = 0
        for names, counted in (
            (("all_gather_single", "all_gather_into_tensor"), lambda out, x: (size - 1) * x.nbytes),
            (("reduce_scatter_single", "reduce_scatter_tensor"), lambda out, x: (size - 1) * out.nbytes),
        ):
            name = next(name for name in names if hasattr(dist, name))
            setattr(dist, name, partial(self.call, getattr(dist, name), counted))
        exchange = dist.all_to_all_single

        def counted_exchange(out, x, receives, sends, group=None):
            row = x.nbytes // max(1, x.shape[0])
            self.bytes += row * (sum(sends) - sends[rank])
            return exchange(out, x, receives, sends, group=group)

        dist.all_to_all_single = counted_exchange

    def call(self, real, counted, out, x, *args, **options):
        self.bytes += counted(out, x)
        return real(out, x, *args, **options)

    def take(self):
        taken, self.bytes = self.bytes, 0
        return taken


def weighted(y, rows):
    return (y * (rows[None, :, None] + 1.0).sin() * torch.arange(1.0, 33.0, dtype=y.dtype)).sum()


def objective(result, rows, real=slice(None)):
    """A function of the output, and of the index loss if there is one."""
    y, *index_loss = result if isinstance(result, tuple) else (result,)
    return weighted(y[:, real], rows[real]) + sum(index_loss[:1])


def compare(name, make, batch, tokens, borders, context, counted):
    torch.manual_seed(0)
    layer = make().double()
    if isinstance(layer, NSAAttention):
        torch.nn.init.normal_(layer.gate.out.weight)
    x = torch.randn(batch, tokens, 32, dtype=torch.float64, requires_grad=True)
    cu_seqlens = None if borders is None else torch.tensor(borders, dtype=torch.int32)
    has_target = torch.arange(tokens) % 5 > 0
    options = {"counted": has_target.expand(batch, -1)} if layer.has_index_loss else {}
    whole = layer(x, cu_seqlens=cu_seqlens, **options)
    objective(whole, torch.arange(tokens)).backward()
    wanted = {n: gradient(p) for n, p in layer.named_parameters() if p.requires_grad}
    wanted["x"], x.grad = x.grad, None
    layer.zero_grad()

    rows, length = context.rows(tokens)
    if cu_seqlens is not None and length > tokens:
        cu_seqlens = torch.tensor([*borders, length], dtype=torch.int32)
    divide_sequences(layer, context)
    mine = torch.nn.functional.pad(x, (0, 0, 0, length - tokens))[:, rows]
    if options:
        options["counted"] = torch.nn.functional.pad(options["counted"], (0, length - tokens))[:, rows]
    counted.take()
    y = layer(mine, cu_seqlens=cu_seqlens, **options)
    forward = counted.take()
    real = rows < tokens
    given, expected = (z[0] if options else z for z in (y, whole))
    assert torch.allclose(given[:, real], expected[:, rows[real]], rtol=1e-9, atol=1e-9), f"{name}: output"
    objective(y, rows, real).backward()
    backward = counted.take()
    if options:
        sums = torch.stack([y[1].detach(), y[2].double()])
        dist.all_reduce(sums)
        assert torch.allclose(sums, torch.stack([whole[1].detach(), whole[2].double()])), f"{name}: index loss"
    found = {n: gradient(p) for n, p in layer.named_parameters() if p.requires_grad}
    found["x"] = x.grad
    for key, grad in found.items():
        dist.all_reduce(grad)
        assert torch.allclose(grad, wanted[key], rtol=1e-8, atol=1e-9), f"{name}: gradient of {key}"
    names = {NSAAttention: "nsa", MSAAttention: "msa", DenseAttention: "dense", WindowAttention: "window"}
    kind = names[type(layer)]
    if getattr(layer, "force_branch", None) is None:
        spec = SPEC if kind == "nsa" else NSASpec(window=getattr(layer, "window", tokens))
        sizes = {"num_kv_heads": 2, "head_dim_k": 16, "head_dim_v": 32, "batch": batch, "itemsize": 8}
        if kind == "msa":
            kind, spec = "dense", None
            sizes["index_dim"] = layer.index_dim if length > layer.spec.dense_tokens else 0
        formula = bytes_per_layer(kind, tokens, context.size, context.rank, spec, gradient_itemsize=8, **sizes)
        assert (forward, backward) == (formula.forward, formula.backward), f"{name}: bytes sent"


def gradient(parameter):
    """Zeros for a parameter that no query trains."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def main():
    dist.init_process_group("gloo")
    context = Context(dist.group.WORLD)
    counted = Counted(context.size, context.rank)
    for name in sys.argv[1:] or LAYERS:
        for batch, tokens, borders in SEQUENCES:
            compare(f"{name} {batch} x {tokens} {borders}", LAYERS[name], batch, tokens, borders, context, counted)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    sys.stdout.flush()
    os._exit(0)
