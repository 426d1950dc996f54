"""What torch.compile makes of a decoder block: the tensors it keeps for backward, and the most it holds meanwhile.

Dynamo, autograd's tracing and the partitioner that decides what is kept run for real, on fake tensors; only code
generation is left out. Which tensors generated kernels would write to memory is told by a rule: a tensor gets a buffer
if a product, an operator of `nsa` or anything else that is not fused makes it or reads it, if a sum makes it, if the
graph returns it, or if it has many readers. What lies between them is fused away.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_iter

from nsa.checks.memory_trace import LiveBytes, Pass
from nsa.checks.memory_workspaces import workspace_bytes
from nsa.nn.model import Decoder

# Computed together with their readers, like all that torch calls pointwise; and together with what they read.
_FUSED = {"cat", "clone", "constant_pad_nd", "empty", "full", "full_like", "iota", "select_scatter", "slice_scatter"}
_REDUCTIONS = {"amax", "any", "cumsum", "mean", "sum", "var_mean"}
MANY_READERS = 3  # a fused tensor with as many is written once rather than computed again by each


@dataclass(frozen=True)
class BlockPlan:
    """Bytes of one compiled block: of each tensor kept, and the most it holds beside weights and its input.

    Both peaks count what is kept; the forward one also the result, the backward one the gradient it starts from.
    """

    kept: tuple[int, ...]
    forward_peak: float
    backward_peak: float


def replace_blocks(model: Decoder, which: Pass, live: LiveBytes) -> None:
    """Compiles one block; every block's forward becomes a stand-in that holds what the compiled one would."""
    plan = plan_block(model.blocks[0], which)
    for block in model.blocks:
        parameters = [p for p in block.parameters() if p.requires_grad]
        block.forward = StandIn.of(plan, live, parameters)


def plan_block(block: nn.Module, which: Pass) -> BlockPlan:
    """Must be called under the fake mode that the block was made in."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs: dict[str, fx.Graph] = {}

    def keep(name: str) -> Callable[[fx.GraphModule, Any], Any]:
        def compiler(module: fx.GraphModule, example: Any) -> Any:
            graphs[name] = module.graph
            return make_boxed_func(module.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )
    tokens, borders = which.batch()
    # The stream starts from the embedding, which is of the parameters' type.
    x = torch.empty(*tokens.shape, which.config.model.dim, dtype=which.param_dtype, requires_grad=True)
    with _quiet():
        with which.autocast():
            y = torch.compile(block.forward, backend=backend, fullgraph=True)(x, borders)
        y.sum().backward()
    for parameter in block.parameters():
        parameter.grad = None
    torch._dynamo.reset()
    return _plan(graphs["forward"], graphs["backward"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's advice about checkpointing inside compiled code."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _plan(forward: fx.Graph, backward: fx.Graph) -> BlockPlan:
    given = _all_storages(node for node in forward.nodes if node.op == "placeholder")
    result, *others = _outputs(forward)
    elsewhere = given.keys() | _storages(result).keys()
    kept = [size for storage, size in _all_storages(others).items() if storage not in elsewhere]
    return BlockPlan(tuple(kept), peak_of(forward), peak_of(backward))


def peak_of(graph: fx.Graph) -> float:
    """The most bytes a graph holds when it runs from top to bottom and every buffer goes after its last reader.

    Inputs are not counted, but for those of a backward graph that are no weights: they go after their last reader.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    returned = _all_storages(_outputs(graph)).keys()
    reads = _reads(nodes, returned)
    last = {storage: node for node in nodes for storage in reads.get(node, ())}
    held = _all_storages(node for node in graph.nodes if node.op == "placeholder" and not _is_weight(node))
    highest = float(sum(held.values()))
    for node in nodes:
        if node in reads:
            held |= {storage: size for storage, size in _made(node).items() if storage in last or storage in returned}
        highest = max(highest, sum(held.values()) + _workspace(node))
        for storage in reads.get(node, ()):
            if last[storage] is node and storage not in returned:
                held.pop(storage, None)
    return highest


def _reads(nodes: list[fx.Node], returned: Collection[int]) -> dict[fx.Node, set[int]]:
    """The buffers that each node reads when it runs; nodes that are fused into their readers do not run."""
    written = _written(nodes) | set(returned)
    sources: dict[int, set[int]] = {}  # of tensors that no buffer holds
    reads: dict[fx.Node, set[int]] = {}
    for node in nodes:
        needed = {source for given in _given(node) for source in sources.get(given, {given})}
        made = _made(node).keys()
        if made & written:
            reads[node] = needed
        else:
            sources |= dict.fromkeys(made, needed)
    return reads


def _written(nodes: list[fx.Node]) -> set[int]:
    """The storages that get a buffer."""
    written: set[int] = set()
    readers: Counter[int] = Counter()
    for node in nodes:
        kind = _kind(node)
        if kind != "fused":
            written |= _made(node).keys()
        if kind == "opaque":
            written |= _given(node).keys()
        if _made(node):
            readers.update(_given(node).keys())
    return written | {storage for storage, count in readers.items() if count >= MANY_READERS}


def _kind(node: fx.Node) -> str:
    """Whether a node is "fused" into generated kernels, a "reduction" which ends one, or "opaque" to them."""
    name = getattr(node.target, "_opname", "")
    if name in _REDUCTIONS:
        return "reduction"
    is_fused = name in _FUSED or torch.Tag.pointwise in getattr(node.target, "tags", ()) or not _made(node)
    return "fused" if is_fused else "opaque"


def _is_weight(node: fx.Node) -> bool:
    """Inputs of the forward pass, called so in both graphs: weights, borders and the stream, which others hold."""
    return node.name.startswith("primals")


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    return [node for node in output.args[0] if isinstance(node, fx.Node)]


def _made(node: fx.Node) -> dict[int, int]:
    """The storages that a node makes, which are none for a view."""
    given = _given(node)
    return {storage: size for storage, size in _storages(node).items() if storage not in given}


def _given(node: fx.Node) -> dict[int, int]:
    return _all_storages(node.all_input_nodes)


def _all_storages(nodes: Iterable[fx.Node]) -> dict[int, int]:
    return {storage: size for node in nodes for storage, size in _storages(node).items()}


def _storages(node: fx.Node) -> dict[int, int]:
    """The memory that a node's tensors lie in, by name, and its bytes."""
    tensors = [value for value in tree_iter(node.meta.get("val")) if isinstance(value, Tensor)]
    return {t.untyped_storage()._cdata: int(t.untyped_storage().nbytes()) for t in tensors}


def _workspace(node: fx.Node) -> float:
    args: Any = fx.map_arg(node.args, lambda given: given.meta.get("val"))
    return workspace_bytes(node.target, args)


class StandIn(torch.autograd.Function):
    """A compiled block as the allocator sees it."""

    @staticmethod
    def of(plan: BlockPlan, live: LiveBytes, parameters: list[nn.Parameter]) -> Callable[..., Tensor]:
        def forward(x: Tensor, borders: Tensor | None = None) -> Tensor:
            y: Tensor = StandIn.apply(plan, live, x, *parameters)  # type: ignore[no-untyped-call]
            return y

        return forward

    @staticmethod
    def forward(ctx: Any, plan: BlockPlan, live: LiveBytes, x: Tensor, *parameters: Tensor) -> Tensor:
        live.note(temporaries=plan.forward_peak)
        kept = [torch.empty(size, dtype=torch.uint8) for size in plan.kept]
        ctx.save_for_backward(x, *parameters, *kept)
        ctx.plan, ctx.live, ctx.num_parameters = plan, live, len(parameters)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *others = ctx.saved_tensors
        held = sum(ctx.plan.kept) + grads[0].untyped_storage().nbytes()
        ctx.live.note(temporaries=max(0.0, ctx.plan.backward_peak - held))
        return None, None, torch.empty_like(x), *map(torch.empty_like, others[: ctx.num_parameters])
