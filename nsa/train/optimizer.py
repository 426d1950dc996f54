"""AdamW, or Muon for the matrices inside the blocks and AdamW for the other parameters.

Weight decay applies to matrices, not to norms, biases and embeddings.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr

from nsa.config.schema import TrainConfig
from nsa.errors import ConfigError
from nsa.nn.model import Decoder
from nsa.parallel.context import Context

MOST_ELEMENTS = 1 << 25  # per rank and round of matrices in Muon: at most 0.4 GiB of temporaries, 0.8 GiB on a CPU


def build_optimizer(model: Decoder, train: TrainConfig) -> torch.optim.Optimizer:
    hidden = hidden_matrices(model) if train.optimizer == "muon" else []
    excluded = {id(parameter) for parameter in hidden}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    groups: dict[float, list[nn.Parameter]] = {train.weight_decay: [], 0.0: []}  # by their weight decay
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in excluded:
            decays = parameter.dim() >= 2 and id(parameter) not in embeddings
            groups[train.weight_decay if decays else 0.0].append(parameter)
    given = [{"params": group, "weight_decay": decay} for decay, group in groups.items() if group]
    if hidden and not given:
        raise ConfigError("train.freeze: muon needs a trainable parameter other than the blocks' matrices; use adamw")
    adamw = torch.optim.AdamW(given, lr=train.lr, betas=(train.beta1, train.beta2), fused=True)
    return MuonAndAdamW(hidden, adamw, train) if hidden else adamw


def hidden_matrices(model: Decoder) -> list[nn.Parameter]:
    """The trainable weights of the linear layers inside the blocks, which Muon updates."""
    linears = {id(module.weight) for module in model.blocks.modules() if isinstance(module, nn.Linear)}
    return [p for p in model.parameters() if id(p) in linears and p.requires_grad]


class BatchedMuon(torch.optim.Muon):
    """PyTorch's Muon with the same state, for whole matrices and for matrices that FSDP shards.

    Matrices of one shape are orthogonalized together: PyTorch starts some 26 kernels for each matrix, which takes the
    host longer than a small model's whole step takes a GPU. Under FSDP each rank orthogonalizes its share of the
    matrices: one all-to-all sends their shards to that rank, and another one returns shards of the results.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Moves the parameters by their gradients; takes no closure."""
        assert closure is None
        for group in self.param_groups:
            tensors: tuple[list[Tensor], ...] = ([], [], [])  # parameters, gradients, momenta
            self._init_group(group, *tensors)
            shapes = tuple(parameter.shape for parameter in tensors[0])
            first = group["params"][0]
            ranks = Context(first.device_mesh.get_group() if isinstance(first, DTensor) else None)
            shards = [[t.to_local() if isinstance(t, DTensor) else t for t in kind] for kind in tensors]
            for shares in divide(shapes, ranks.size, MOST_ELEMENTS):
                self.move(group, shares, shapes, shards, ranks)

    def move(
        self,
        group: dict[str, Any],
        shares: list[list[int]],
        shapes: tuple[torch.Size, ...],
        shards: list[list[Tensor]],
        ranks: Context,
    ) -> None:
        """Moves this rank's shards of the matrices that the ranks orthogonalize in one round."""
        lr, momentum = group["lr"], group["momentum"]
        places = [place for share in shares for place in share]
        parameters, gradients, momenta = ([kind[place] for place in places] for kind in shards)
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, momenta, momentum) if group["nesterov"] else momenta
        # A GPU orthogonalizes in bf16, every CPU in fp32: PyTorch emulates bf16 products where a CPU lacks instructions
        # for them, hundreds of times slower, and a run's numbers must not depend on these instructions.
        dtype = torch.float32 if parameters[0].is_cpu else torch.bfloat16
        flat = parameters[0].new_empty(sum(p.numel() for p in parameters), dtype=dtype)
        local_shapes = [parameter.shape for parameter in parameters]
        torch._foreach_copy_(_split(flat, local_shapes), ahead)
        del ahead
        sends = [sum(shards[0][place].numel() for place in share) for share in shares]
        own = Counter(shapes[place] for place in shares[ranks.rank])
        flat = exchange_and_orthogonalize(flat, sends, own, ranks, group)
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        # The foreach kernel needs tensors of the parameters' dtype.
        directions = _split(flat.to(parameters[0].dtype), local_shapes)
        for shape in dict.fromkeys(shapes[place] for place in places):
            same = [i for i, place in enumerate(places) if shapes[place] == shape]
            adjusted_lr = _adjust_lr(lr, group["adjust_lr_fn"], shape)
            torch._foreach_add_([parameters[i] for i in same], [directions[i] for i in same], alpha=-adjusted_lr)


@cache
def divide(shapes: tuple[torch.Size, ...], ranks: int, most: int) -> list[list[list[int]]]:
    """Divides the orthogonalization of matrices among ranks, in rounds: the indices of each rank's matrices by round.

    Ranks get equal work, as far as whole matrices allow. In a round a rank has at most `most` elements, or one matrix;
    its matrices of one shape are neighbours.
    """

    def work(place: int) -> int:
        return shapes[place].numel() * min(shapes[place])

    loads = [0] * ranks
    rounds: list[list[list[int]]] = [[] for _ in range(ranks)]  # of each rank
    for place in sorted(range(len(shapes)), key=lambda place: (-work(place), shapes[place])):
        rank = loads.index(min(loads))
        loads[rank] += work(place)
        own = rounds[rank]
        if not own or sum(shapes[other].numel() for other in [*own[-1], place]) > most:
            own.append([])
        own[-1].append(place)
    return [list(shares) for shares in zip_longest(*rounds, fillvalue=[])]


def exchange_and_orthogonalize(
    flat: Tensor, sends: list[int], own: Mapping[torch.Size, int], ranks: Context, group: dict[str, Any]
) -> Tensor:
    """Returns the shards of the orthogonalized matrices in the layout of `flat`.

    `flat` holds this rank's shards of all matrices of a round, ordered by the rank that orthogonalizes them; `sends`
    are the elements for each rank, `own` the shapes of this rank's matrices with their number, `group` the settings.
    """
    pieces = [[(n, *shard_shape(shape, ranks.size, rank)) for shape, n in own.items()] for rank in range(ranks.size)]
    receives = [sum(map(math.prod, sent)) for sent in pieces]
    received = ranks.exchange(flat, receives, sends) if ranks.size > 1 else flat
    by_rank = [_split(part, sent) for part, sent in zip(received.split(receives), pieces, strict=True)]
    coefficients, steps, eps = (group[name] for name in ("ns_coefficients", "ns_steps", "eps"))
    for shards in zip(*by_rank, strict=True):  # of the matrices of one shape, by the rank that sent them
        # Python 3.11 would keep the concatenated matrices until the call returns if `*options` were passed here.
        directions = orthogonalize(torch.cat(shards, dim=1) if ranks.size > 1 else shards[0], coefficients, steps, eps)
        torch._foreach_copy_(shards, directions.split([shard.shape[1] for shard in shards], dim=1))
    return ranks.exchange(received, sends, receives) if ranks.size > 1 else received


def shard_shape(shape: torch.Size, size: int, rank: int) -> tuple[int, int]:
    """The shape of a rank's shard of a matrix: FSDP divides rows as `torch.chunk` does."""
    rows = -(-shape[0] // size)
    return max(0, min(rows, shape[0] - rank * rows)), shape[1]


def _split(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of consecutive parts of `flat` with the given shapes."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def orthogonalize(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iterations on each of [number, rows, columns], as `torch.optim.Muon` does on one."""
    a, b, c = coefficients
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimizers as one, with shared groups and state, so that schedules and checkpoints see a single optimizer.

    Muon's steps are scaled to the size of AdamW's (`match_rms_adamw`), so that one learning rate serves both.
    """

    def __init__(self, hidden: list[nn.Parameter], adamw: torch.optim.AdamW, train: TrainConfig):
        muon = BatchedMuon(hidden, lr=train.lr, weight_decay=train.weight_decay, adjust_lr_fn="match_rms_adamw")
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        muon.state = adamw.state = self.state
        self._parts = (muon, adamw)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Moves the parameters by their gradients; takes no closure."""
        assert closure is None
        for part in self._parts:
            part.step()
