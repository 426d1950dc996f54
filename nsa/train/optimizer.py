"""AdamW, or Muon for the matrices inside the blocks and AdamW for the other parameters.

Weight decay applies to matrices, not to norms, biases and embeddings.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import _adjust_lr

from nsa.config.schema import TrainConfig
from nsa.errors import ConfigError
from nsa.nn.model import Decoder

MOST_ELEMENTS = 1 << 25  # per batch of matrices in Muon: 0.5 GiB of temporaries, 1 GiB on a CPU


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
    """PyTorch's Muon with the same state. Matrices of one shape are orthogonalized together: PyTorch starts some 26
    kernels for each matrix, which takes the host longer than a small model's whole step takes a GPU."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Moves the parameters by their gradients; takes no closure."""
        assert closure is None
        for group in self.param_groups:
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            momenta: list[Tensor] = []
            self._init_group(group, parameters, gradients, momenta)
            for places in batches([parameter.shape for parameter in parameters]):
                self._move(group, *([of[i] for i in places] for of in (parameters, gradients, momenta)))

    def _move(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor], momenta: list[Tensor]
    ) -> None:
        lr, momentum = group["lr"], group["momentum"]
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, momenta, momentum) if group["nesterov"] else momenta
        directions = orthogonalize(torch.stack(ahead), group["ns_coefficients"], group["ns_steps"], group["eps"])
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        # The foreach kernel needs contiguous tensors of the parameters' dtype.
        directions = directions.to(parameters[0].dtype, memory_format=torch.contiguous_format)
        adjusted_lr = _adjust_lr(lr, group["adjust_lr_fn"], parameters[0].shape)
        torch._foreach_add_(parameters, directions.unbind(), alpha=-adjusted_lr)


def batches(shapes: list[torch.Size]) -> Iterator[list[int]]:
    """Groups the indices of equal shapes into batches of at most MOST_ELEMENTS elements, or one matrix."""
    places: dict[torch.Size, list[int]] = defaultdict(list)
    for place, shape in enumerate(shapes):
        places[shape].append(place)
    for shape, same in places.items():
        count = max(1, MOST_ELEMENTS // shape.numel())
        for first in range(0, len(same), count):
            yield same[first : first + count]


def orthogonalize(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iterations on each of [number, rows, columns], as `torch.optim.Muon` does on one.

    A GPU computes in bf16, every CPU in fp32: PyTorch emulates bf16 products where a CPU has no instructions for them,
    hundreds of times slower, and a run's numbers must not depend on those instructions.
    """
    a, b, c = coefficients
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
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
