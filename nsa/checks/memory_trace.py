"""One training pass on tensors that have shapes and no memory, and how many bytes would live at each moment of it.

The model's own code runs, forward and backward, under torch's fake tensors: no weight is allocated, no GPU is needed.
What a kernel allocates inside is added by `memory_workspaces`; what a compiled block keeps by `memory_compiled`. Blocks
are alike, so at most three are traced: the first, the last, and one that stands for all between them.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from nsa.checks.memory_workspaces import workspace_bytes
from nsa.config import Config
from nsa.nn.loss import loss_sum
from nsa.nn.model import Decoder, build_model
from nsa.parallel.recompute import Granularity, apply_recompute
from nsa.train.state import AUTOCAST_TYPES, chosen_kernels

# Blocks that are traced, by how many the model has: all of up to three, three of more.
PLACES = (("last",), ("first", "last"), ("first", "middle", "last"))
MOST_TRACED = len(PLACES)
ALIGNMENT = 512  # CUDA's caching allocator hands out multiples of it
TOKENS_PER_DOCUMENT = 512  # assumed where documents are kept apart; tables grow a little with their number


@dataclass(frozen=True)
class Moment:
    """Bytes that live at one moment, beside weights and optimizer state.

    activations made in forward, temporaries made in backward (recomputed activations, gradients of activations),
    gradients of parameters, and the workspace of the kernel that runs.
    """

    activations: float = 0.0
    temporaries: float = 0.0
    gradients: float = 0.0
    workspaces: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.temporaries + self.gradients + self.workspaces


@dataclass(frozen=True)
class Pass:
    """What is traced: `micro_batch` sequences through a model whose parameters are of type `param_dtype`."""

    config: Config
    vocab_size: int
    precision: str  # as build_state resolves it: no "auto"
    micro_batch: int
    checkpointing: Granularity
    param_dtype: torch.dtype = torch.float32
    norms_in_float32: bool = True  # what autocast makes of them

    @property
    def packed(self) -> bool:
        return self.config.data.isolate_documents

    def batch(self) -> tuple[Tensor, Tensor | None]:
        """Tokens and document borders as the loader makes them: documents kept apart lie back to back in one row."""
        length = self.config.train.seq_len
        if not self.packed:
            return torch.zeros(self.micro_batch, length, dtype=torch.int64), None
        tokens = torch.zeros(1, self.micro_batch * length, dtype=torch.int64)
        documents = self.micro_batch + tokens.numel() // TOKENS_PER_DOCUMENT
        return tokens, torch.zeros(documents + 1, dtype=torch.int32)

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = AUTOCAST_TYPES.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    def attention_of_a_gpu(self) -> AbstractContextManager[Any]:
        """A mask and grouped heads at once: most GPUs have no fused kernel for that, and make whole score matrices."""
        model = self.config.model
        masked = model.attention == "dense" and self.packed
        return sdpa_kernel(SDPBackend.MATH) if masked and model.n_heads != model.n_kv_heads else nullcontext()


@dataclass(frozen=True)
class Trace:
    """The highest moment of every phase of a pass, and the model's numbers of parameters.

    Phases in order: "start", "first block's forward" and so on, "head", "head's backward", "last block's backward" and
    so on, "embedding's backward". `kept_by_block` is what a block's forward leaves for backward; what autocast holds
    until the end of forward comes on top of it and makes `held_by_block`.
    """

    layers: int
    phases: dict[str, Moment]
    held_by_block: float
    kept_by_block: float
    gradients_by_block: float
    block_parameters: int
    frozen_by_block: int
    other_parameters: int

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.other_parameters

    @property
    def trainable(self) -> int:
        return self.parameters - self.layers * self.frozen_by_block

    def moments(self) -> dict[str, Moment]:
        """The highest moment of every phase of the whole model: of what was traced, with the blocks that were not.

        Until the last block's backward all of them are kept; when the first one's begins, all their gradients are
        there. The middle ones go from one state to the other, and are highest at one end.
        """
        untraced = max(0, self.layers - MOST_TRACED)
        gradients = untraced * self.gradients_by_block
        highest: dict[str, Moment] = {}
        for name, moment in self.phases.items():
            kept = untraced * (self.kept_by_block if "backward" in name else self.held_by_block)
            before = replace(moment, activations=moment.activations + kept)
            after = replace(moment, gradients=moment.gradients + gradients)
            highest[name] = after if name in ("first block's backward", "embedding's backward") else before
            if name == "middle block's backward" and untraced:
                highest["second block's backward"] = after
        return highest


@dataclass
class _Held:
    """One storage that lives."""

    size: int
    kind: str
    reference: Any  # a weak one, which tells of its end


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators make inside, from their birth until nothing refers to them."""

    def __init__(self, ignored: list[Tensor]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = {"activations": 0, "temporaries": 0, "gradients": 0}
        self.phases: dict[str, Moment] = {}
        self.started: dict[str, Moment] = {}  # what lived when a phase began
        self._held: dict[int, _Held] = {}
        self.enter("start", "activations")
        for tensor in ignored:
            self._hold(tensor, counted=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.prim.device.default:
            for tensor in tree_iter(result):
                if isinstance(tensor, Tensor):
                    self._hold(tensor)
            self.note(workspaces=workspace_bytes(func, args))
        return result

    def enter(self, phase: str, kind: str) -> None:
        """From here on the pass is in `phase`, and what is made is of `kind`."""
        self.phase, self.kind = phase, kind
        self.started[phase] = Moment(**self.now)

    def note(self, *, temporaries: float = 0.0, workspaces: float = 0.0) -> None:
        """Remembers this moment, with what is given on top of what lives, if it is the highest of its phase."""
        live = Moment(**self.now)
        moment = replace(live, temporaries=live.temporaries + temporaries, workspaces=workspaces)
        highest = self.phases.get(self.phase)
        if highest is None or moment.total > highest.total:
            self.phases[self.phase] = moment

    def becomes_gradient(self, tensor: Tensor) -> None:
        held = self._held[tensor.untyped_storage()._cdata]
        self.now[held.kind] -= held.size
        held.kind = "gradients"
        self.now[held.kind] += held.size

    def _hold(self, tensor: Tensor, *, counted: bool = True) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held:
            return
        size = -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT if counted else 0
        self._held[key] = _Held(size, self.kind, weakref.ref(storage, lambda _: self._free(key)))
        self.now[self.kind] += size

    def _free(self, key: int) -> None:
        held = self._held.pop(key)
        self.now[held.kind] -= held.size


def trace(which: Pass) -> Trace:
    """Runs one forward and backward pass of the model, shortened to three blocks, as it would run on a GPU."""
    config = which.config
    shortened = config.model.model_copy(update={"n_layers": min(MOST_TRACED, config.model.n_layers)})
    # A checkpoint inside compiled code carries a random state, which is real.
    with FakeTensorMode(allow_non_fake_inputs=True), which.attention_of_a_gpu():
        model = build_model(shortened, config.nsa, which.vocab_size, 0, chosen_kernels(config))
        _change_type(model, which.param_dtype)
        live = LiveBytes([*model.parameters(), *model.buffers()])
        _prepare(model, which, live)
        _watch(model, live)
        with live:
            _run(model, which, live)
    return _summary(model, live, config.model.n_layers)


def _change_type(model: Decoder, dtype: torch.dtype) -> None:
    """What `model.to(dtype)` does, which fake tensors refuse."""
    changed: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in changed:
                changed[parameter] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            setattr(module, name, changed[parameter])


def _prepare(model: Decoder, which: Pass, live: LiveBytes) -> None:
    """Checkpoints and compiles as the trainer does, and lets norms hold what they hold on a GPU."""
    compiled = which.config.runtime.compile
    apply_recompute(model, which.checkpointing, compiled=compiled)
    if compiled:
        from nsa.checks.memory_compiled import replace_blocks

        replace_blocks(model, which, live)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.forward = FusedNorm.of(module, which)  # type: ignore[method-assign, assignment]


def _watch(model: Decoder, live: LiveBytes) -> None:
    """Tells `live` where the pass is, and which tensors are gradients of parameters."""

    def forward_is(name: str) -> Callable[..., None]:
        return lambda *_: live.enter(name, "activations")

    def backward_is(name: str) -> Callable[..., None]:
        def mark(module: nn.Module, given: Any, output: Tensor) -> None:
            output.register_hook(lambda _: live.enter(name, "temporaries"))

        return mark

    def arrived(parameter: Tensor) -> None:
        assert parameter.grad is not None
        live.becomes_gradient(parameter.grad)

    model.embedding.register_forward_hook(backward_is("embedding's backward"))
    for place, block in zip(PLACES[len(model.blocks) - 1], model.blocks, strict=True):
        block.register_forward_pre_hook(forward_is(f"{place} block's forward"))
        block.register_forward_hook(backward_is(f"{place} block's backward"))
    model.norm.register_forward_pre_hook(forward_is("head"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(arrived)


def _run(model: Decoder, which: Pass, live: LiveBytes) -> None:
    tokens, borders = which.batch()
    with which.autocast():
        loss = loss_sum(model(tokens, borders), torch.zeros_like(tokens))
    live.enter("head's backward", "temporaries")
    loss.backward()


def _summary(model: Decoder, live: LiveBytes, layers: int) -> Trace:
    block, started = model.blocks[-1], live.started
    in_block = sum(p.numel() for p in block.parameters())
    held = kept = gradients = 0.0
    if layers > MOST_TRACED:
        held = started["last block's forward"].activations - started["middle block's forward"].activations
        first, middle = started["first block's backward"], started["middle block's backward"]
        kept, gradients = middle.activations - first.activations, first.gradients - middle.gradients
    return Trace(
        layers,
        live.phases,
        held,
        kept,
        gradients,
        block_parameters=in_block,
        frozen_by_block=sum(p.numel() for p in block.parameters() if not p.requires_grad),
        other_parameters=model.num_parameters() - len(model.blocks) * in_block,
    )


class FusedNorm(torch.autograd.Function):
    """RMSNorm as a GPU computes it, in one kernel that keeps its input and one number a row.

    On a CPU it is taken apart, and would seem to keep a second copy.
    """

    @staticmethod
    def of(norm: nn.RMSNorm, which: Pass) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            x = x.float() if which.norms_in_float32 else x
            y: Tensor = FusedNorm.apply(x, norm.weight)  # type: ignore[no-untyped-call]
            return y

        return forward

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
