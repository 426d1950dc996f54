"""Traces one training pass on fake tensors and records the peak of live bytes in each of its phases.

The model's forward and backward run on tensors without storage, so no memory is allocated and no GPU is needed.
`memory_workspaces` adds the memory that kernels allocate internally. Blocks of one kind need equal memory, so at most
three are traced: the first, the last, and one that represents all blocks in between.
"""

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from nsa.checks.memory_workspaces import workspace_bytes
from nsa.config import Config
from nsa.nn.attention import attention_layers
from nsa.nn.loss import next_token_loss
from nsa.nn.model import Decoder, build_model
from nsa.nn.projection import is_float8
from nsa.parallel.context import Context
from nsa.parallel.float8 import replace_linears
from nsa.parallel.transform import divide_sequences, recompute
from nsa.train.optimizer import MOST_ELEMENTS, BatchedMuon, divide, shard_shape
from nsa.train.state import AUTOCAST_TYPES, chosen_kernels

TRACED_BLOCKS = 3  # of a model with more blocks, if all are of one kind
ALIGNMENT = 512  # the CUDA caching allocator rounds sizes up to multiples of this
NORMS_IN_FLOAT32 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)  # autocast does so since 2.12
TOKENS_PER_DOCUMENT = 512  # assumed for isolated documents; tables grow slightly with the number of documents


@dataclass(frozen=True)
class Moment:
    """Bytes that are live at one moment, besides weights and optimizer state.

    activations   allocated in the forward pass of embedding and blocks
    temporaries   allocated in their backward pass: recomputed activations and gradients of activations
    logits        allocated by the head and the loss, in forward and backward
    gradients     gradients of parameters
    workspaces    memory that the running kernel allocates internally, or the optimizer in its step
    """

    activations: float = 0.0
    temporaries: float = 0.0
    logits: float = 0.0
    gradients: float = 0.0
    workspaces: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.temporaries + self.logits + self.gradients + self.workspaces

    def plus(self, other: "Moment", times: float = 1.0) -> "Moment":
        return Moment(**{kind: value + times * getattr(other, kind) for kind, value in vars(self).items()})


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators allocate, from their creation until they are freed."""

    def __init__(self, ignored: list[Tensor]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = {"activations": 0, "temporaries": 0, "logits": 0, "gradients": 0}
        self.phases: dict[str, Moment] = {}  # the peak of each phase
        self.started: dict[str, Moment] = {}  # the live bytes at the start of each phase
        self._storages: dict[int, tuple[int, str, Any]] = {}  # size, kind and weak reference of every live storage
        self.enter("start", "activations")
        for tensor in ignored:
            self._track(tensor, counted=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # runs at every access to a fake tensor's device
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._track(tensor)
        moment = Moment(**self.now, workspaces=workspace_bytes(func, args, peak_bytes))
        if self.phase not in self.phases or moment.total > self.phases[self.phase].total:
            self.phases[self.phase] = moment
        return result

    def enter(self, phase: str, kind: str) -> None:
        """Starts a phase in which operators allocate bytes of `kind`."""
        self.phase, self.kind = phase, kind
        self.started[phase] = Moment(**self.now)

    def mark_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        key = parameter.grad.untyped_storage()._cdata
        size, kind, reference = self._storages[key]
        self._storages[key] = size, "gradients", reference
        self.now[kind] -= size
        self.now["gradients"] += size

    def _track(self, tensor: Tensor, *, counted: bool = True) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            size = -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT if counted else 0
            self._storages[key] = size, self.kind, weakref.ref(storage, lambda _: self._free(key))
            self.now[self.kind] += size

    def _free(self, key: int) -> None:
        size, kind, _ = self._storages.pop(key)
        self.now[kind] -= size


def peak_bytes(run: Callable[..., Any], arguments: Mapping[str, Any]) -> float:
    """Returns the peak of bytes that `run(**arguments)` allocates, besides its arguments and results."""
    live = LiveBytes([x for x in arguments.values() if isinstance(x, Tensor)])
    with live:
        results = run(**arguments)
    kept: dict[int, int] = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tree_iter(results)}
    return live.phases["start"].total - sum(kept.values())


def muon_bytes(matrices: list[nn.Parameter], ranks: int) -> float:
    """Returns the peak of bytes that Muon's step allocates on the first of `ranks` ranks that shard the matrices."""
    muon, shapes = BatchedMuon(matrices), tuple(matrix.shape for matrix in matrices)
    shards = [[torch.empty(shard_shape(s, ranks, 0), device="meta") for s in shapes] for _ in range(3)]
    live = LiveBytes([tensor for kind in shards for tensor in kind])
    with torch.no_grad(), live:
        for shares in divide(shapes, ranks, MOST_ELEMENTS):
            muon.move(muon.param_groups[0], shares, shapes, shards, Context(None, ranks))
    return live.phases["start"].total


def trace(config: Config, param_dtype: torch.dtype) -> dict[str, Moment]:
    """Runs one forward and backward pass of a micro-batch as on a GPU, with the model shortened to three blocks if all
    are of one kind. Returns the peak of every phase.

    Phases in order: "start", "first block's forward" and so on, "head", "head's backward", "last block's backward" and
    so on, "embedding's backward". `config` has no "auto": its micro-batch, precision and vocabulary size are set.
    """
    mixed = len(set(config.model.layer_kinds())) > 1
    traced = config.model.n_layers if mixed else min(TRACED_BLOCKS, config.model.n_layers)
    shortened = config.model_copy(update={"model": config.model.model_copy(update={"n_layers": traced})})
    assert config.model.vocab_size is not None
    with FakeTensorMode():
        default = torch.get_default_dtype()
        torch.set_default_dtype(param_dtype)  # fake tensors do not support `model.to(dtype)`
        try:
            model = build_model(shortened, config.model.vocab_size, 0, chosen_kernels(config))
        finally:
            torch.set_default_dtype(default)
        for _, layer in attention_layers(model):
            layer.prepare(config.train.seq_len)
        if config.runtime.float8 != "none":
            for linear in filter(is_float8, replace_linears(model, config.runtime.float8, emulate=False).modules()):
                linear.forward = partial(_cast_input, linear.forward)  # type: ignore[method-assign]
        live = LiveBytes([*model.parameters(), *model.buffers()])
        context = Context(None, config.parallel.context)
        if context.size > 1:
            divide_sequences(model, context)
        recompute(model, config.runtime.gradient_checkpointing)
        for norm in (module for module in model.modules() if isinstance(module, nn.RMSNorm)):
            norm.forward = partial(_fused_norm, weight=norm.weight)  # type: ignore[method-assign]
        _register_hooks(model, live)
        with live:
            _run(model, config, live, context)
    untraced = config.model.n_layers - traced
    return _all_blocks(live, untraced) if untraced else live.phases


def _all_blocks(live: LiveBytes, untraced: int) -> dict[str, Moment]:
    """Extends the phases of the traced blocks to the whole model.

    Until the last block's backward, all blocks have activations; when the first block's backward starts, all others
    have gradients. The middle blocks go from one state to the other, and their peak is at one of the two ends.
    """
    started = live.started
    first, middle = started["first block's backward"], started["middle block's backward"]
    # In the forward pass autocast also keeps converted weights.
    forward = started["last block's forward"].plus(started["middle block's forward"], -1)
    kept = Moment(activations=middle.activations - first.activations)
    gradients = Moment(gradients=first.gradients - middle.gradients)
    after = ("first block's backward", "embedding's backward")
    phases = {"second block's backward": live.phases["middle block's backward"].plus(gradients, untraced)}
    for name, moment in live.phases.items():
        added = gradients if name in after else kept if "backward" in name else forward
        phases[name] = moment.plus(added, untraced)
    return phases


def _register_hooks(model: Decoder, live: LiveBytes) -> None:
    """Reports to `live` which phase the pass is in, and which tensors are gradients of parameters."""

    def forward_of(phase: str, kind: str = "activations") -> Callable[..., None]:
        return lambda *_: live.enter(phase, kind)

    def backward_of(phase: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            y_BSC: Tensor = output[0] if isinstance(output, tuple) else output  # beside it, the index loss
            y_BSC.register_hook(lambda _: live.enter(phase, "temporaries"))

        return hook

    model.embedding.register_forward_hook(backward_of("embedding's backward"))
    count = len(model.blocks)
    between = ["middle"] if count == 3 else [f"no. {number}" for number in range(2, count)]
    for place, block in zip(["first", *between, "last"][-count:], model.blocks, strict=True):
        block.register_forward_pre_hook(forward_of(f"{place} block's forward"))
        block.register_forward_hook(backward_of(f"{place} block's backward"))
    model.norm.register_forward_pre_hook(forward_of("head", "logits"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(live.mark_gradient)


def _run(model: Decoder, config: Config, live: LiveBytes, context: Context) -> None:
    """Runs a pass over a batch with the loader's shapes: isolated documents are concatenated into one row, and a rank
    that shares sequences has its part of the tokens."""
    micro_batch, length = config.train.micro_batch, config.train.seq_len
    assert isinstance(micro_batch, int)
    tokens, cu_seqlens = torch.zeros(micro_batch, length, dtype=torch.int64), None
    if config.data.isolate_documents:
        tokens = tokens.view(1, -1)
        documents = micro_batch + tokens.numel() // TOKENS_PER_DOCUMENT
        cu_seqlens = torch.zeros(documents + 1, dtype=torch.int32)
    if context.size > 1:
        tokens = tokens.new_zeros(tokens.shape[0], context.rows(tokens.shape[1])[0].shape[0])
    dtype = AUTOCAST_TYPES.get(config.runtime.precision)
    options = {"counted": torch.ones_like(tokens, dtype=torch.bool)} if model.num_index_terms() else {}
    with nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
        loss_of = partial(next_token_loss, targets_BS=torch.zeros_like(tokens))
        losses = model(tokens, cu_seqlens, length, loss=loss_of, **options).view(-1)
    live.enter("head's backward", "logits")
    losses[:2].sum().backward()  # the loss, and the index loss if there is one


class _FusedNorm(torch.autograd.Function):
    """RMSNorm as a GPU computes it: one kernel that saves its input and one number per row for backward.

    On a CPU, RMSNorm is decomposed and would appear to save a second copy of its input.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _fused_norm(x: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = _FusedNorm.apply(x.float() if NORMS_IN_FLOAT32 else x, weight)  # type: ignore[no-untyped-call]
    return y


def _cast_input(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Casts the input as torchao does on a GPU. It ignores the autocast of a CPU. FP8 needs bf16."""
    return forward(x.to(torch.bfloat16))
