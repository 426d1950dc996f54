"""The selected branch earns its place: recall of what was seen far outside the window.

Every sequence shows 32 keys, each with one of 4 values, in random places among the first 64 tokens; key and value
are one token. The last 16 tokens name keys and want their values. The window reaches 8 tokens back, and a compressed
token is the mean of 16 tokens with about eight pairs among them, which says that a key is there but not with which
value. Only reading the selected block itself answers.
"""

import pytest
import torch

from nsa.config.schema import ModelConfig, NSAConfig
from nsa.nn.model import build_model

KEYS, VALUES, SHOWN, ASKED, STEPS, LR = 32, 4, 64, 16, 400, 5e-3
FILLER = KEYS * VALUES + KEYS
CHANCE = 1 / VALUES


def draw_batch(size, generator):
    tokens = torch.full((size, SHOWN + ASKED), FILLER)
    values = torch.randint(0, VALUES, (size, KEYS), generator=generator)
    places = torch.rand(size, SHOWN, generator=generator).argsort(-1)[:, :KEYS]
    tokens.scatter_(1, places, torch.arange(KEYS) * VALUES + values)
    asked = torch.rand(size, KEYS, generator=generator).argsort(-1)[:, :ASKED]
    tokens[:, SHOWN:] = KEYS * VALUES + asked
    return tokens, values.gather(1, asked)


def recall(force_branch):
    """Share of values recalled on fresh sequences after training."""
    model = build_model(
        ModelConfig(dim=64, n_layers=1, n_heads=4, n_kv_heads=2, head_dim_k=16, head_dim_v=16),
        NSAConfig(
            cmp_block=16,
            cmp_stride=16,
            sel_block=16,
            num_selected=3,
            num_init=0,
            num_local=1,
            window=8,
            force_branch=force_branch,
        ),
        FILLER + 1,
        seed=0,
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        tokens, wanted = draw_batch(32, generator)
        logits = model(tokens)[:, SHOWN:, :VALUES]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 - step / STEPS)
        optimizer.step()
    tokens, wanted = draw_batch(128, generator)
    with torch.no_grad():
        return (model(tokens)[:, SHOWN:, :VALUES].argmax(-1) == wanted).float().mean().item()


def test_nsa_learns_to_recall():
    assert recall(None) > 0.7


@pytest.mark.long
@pytest.mark.parametrize("branch", ["cmp", "win"])
def test_one_branch_without_selection_does_not(branch):
    assert recall(branch) < CHANCE + 0.15
