"""AdamW, or Muon for the matrices inside the blocks and AdamW for the rest.

Matrices decay; norms, biases and embeddings do not.
"""

from typing import Any

import torch
from torch import nn

from nsa.config.schema import TrainConfig
from nsa.errors import ConfigError
from nsa.nn.model import Decoder
from nsa.parallel.numerics import cpu_has_bf16


def build_optimizer(model: Decoder, train: TrainConfig) -> torch.optim.Optimizer:
    hidden = hidden_matrices(model) if train.optimizer == "muon" else []
    excluded = {id(parameter) for parameter in hidden}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in excluded:
            decays = parameter.dim() >= 2 and id(parameter) not in embeddings
            (decayed if decays else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": train.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    if hidden and not decayed and not plain:
        raise ConfigError("train.freeze: muon needs a parameter beside the blocks' matrices that learns; use adamw")
    adamw = torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        fused=True,
    )
    return MuonAndAdamW(hidden, adamw, train) if hidden else adamw


def hidden_matrices(model: Decoder) -> list[nn.Parameter]:
    """The trained weights of the linear layers inside the blocks: what Muon moves."""
    linears = {id(module.weight) for module in model.blocks.modules() if isinstance(module, nn.Linear)}
    return [p for p in model.parameters() if id(p) in linears and p.requires_grad]


class MuonAndAdamW(torch.optim.Optimizer):
    """Two optimizers as one: the same groups and one state, so that schedules and checkpoints see a single one.

    Muon's steps are scaled to the size of AdamW's (`match_rms_adamw`), so that one learning rate serves both.
    """

    def __init__(self, hidden: list[nn.Parameter], adamw: torch.optim.AdamW, train: TrainConfig):
        muon = torch.optim.Muon(hidden, lr=train.lr, weight_decay=train.weight_decay, adjust_lr_fn="match_rms_adamw")
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        muon.state = adamw.state = self.state
        self._parts = (muon, adamw)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Moves the parameters by their gradients; takes no closure."""
        assert closure is None
        mkldnn: Any = torch.backends.mkldnn
        enabled = mkldnn.enabled
        # Muon multiplies in bf16. On a CPU without such instructions PyTorch would turn oneDNN off for the rest of the
        # process, and a run that goes on would compute otherwise than one that is resumed.
        mkldnn.enabled = enabled and cpu_has_bf16()
        try:
            for part in self._parts:
                part.step()  # type: ignore[no-untyped-call]
        finally:
            mkldnn.enabled = enabled
