"""The selected branch earns its place: recall of what was seen far outside the window.

Every sequence shows 32 keys, each with one of 4 values, in random places among the first 64 tokens; key and value
are one token. The last 16 tokens name keys and want their values. The window reaches 8 tokens back, and a compressed
token is the mean of 16 tokens with about eight pairs among them, which says that a key is there but not with which
value. Only reading the selected block itself answers.
"""

from dataclasses import dataclass

import pytest
import torch

from nsa.config.architecture import Architecture, ModelConfig, NSAConfig
from nsa.nn.model import build_model

VALUES, LR = 4, 5e-3
CHANCE = 1 / VALUES


@dataclass(frozen=True)
class Task:
    """Half of the `shown` tokens are keys. A block has `block` tokens, the window half as many."""

    keys: int
    asked: int
    block: int
    batch: int
    steps: int

    @property
    def shown(self):
        return 2 * self.keys

    @property
    def filler(self):
        return self.keys * VALUES + self.keys

    def draw_batch(self, size, generator):
        tokens = torch.full((size, self.shown + self.asked), self.filler)
        values = torch.randint(0, VALUES, (size, self.keys), generator=generator)
        places = torch.rand(size, self.shown, generator=generator).argsort(-1)[:, : self.keys]
        tokens.scatter_(1, places, torch.arange(self.keys) * VALUES + values)
        asked = torch.rand(size, self.keys, generator=generator).argsort(-1)[:, : self.asked]
        tokens[:, self.shown :] = self.keys * VALUES + asked
        return tokens, values.gather(1, asked)


WHOLE = Task(keys=32, asked=16, block=16, batch=32, steps=400)
# A small part of the work, and so few pairs in a block that their mean tells most of them.
SMALL = Task(keys=8, asked=8, block=4, batch=16, steps=120)


def recall(task, force_branch):
    """Share of values recalled on fresh sequences after training."""
    model = build_model(
        Architecture(
            model=ModelConfig(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, head_dim_k=16, head_dim_v=16),
            nsa=NSAConfig(
                cmp_block=task.block,
                cmp_stride=task.block,
                sel_block=task.block,
                num_selected=3,
                num_init=0,
                num_local=1,
                window=task.block // 2,
                force_branch=force_branch,
            ),
        ),
        task.filler + 1,
        seed=0,
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for step in range(task.steps):
        tokens, wanted = task.draw_batch(task.batch, generator)
        logits = model(tokens)[:, task.shown :, :VALUES]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - step / task.steps)
        optimizer.step()
    tokens, wanted = task.draw_batch(128, generator)
    with torch.no_grad():
        return (model(tokens)[:, task.shown :, :VALUES].argmax(-1) == wanted).float().mean().item()


@pytest.mark.parametrize(
    ("task", "least"), [(SMALL, 0.85), pytest.param(WHOLE, 0.7, marks=pytest.mark.long)], ids=["small", "whole"]
)
def test_nsa_learns_to_recall(task, least):
    assert recall(task, None) > least


@pytest.mark.parametrize(
    ("task", "branch"),
    [(SMALL, "win"), *(pytest.param(WHOLE, name, marks=pytest.mark.long) for name in ("cmp", "win"))],
)
def test_one_branch_without_selection_does_not(task, branch):
    assert recall(task, branch) < CHANCE + 0.15
