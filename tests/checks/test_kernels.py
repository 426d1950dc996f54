"""The check of the kernels raises no false alarm, however short the sequences of a run are."""

import pytest
import torch

from nsa.checks.kernels import check_kernels
from nsa.config import parse_config

MODEL = {"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "head_dim_k": 16, "head_dim_v": 32, "mlp_dim": 64}


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize(
    "nsa", [{}, {"cmp_block": 64, "cmp_stride": 64, "window": 16}, {"phi": "mlp"}], ids=["default", "coarse", "mlp"]
)
@pytest.mark.parametrize("seq_len", [16, 64, 100])
def test_sound_kernels_pass_on_short_sequences(seq_len, nsa, isolate):
    config = parse_config(
        {"model": MODEL, "nsa": nsa, "data": {"isolate_documents": isolate}, "train": {"seq_len": seq_len}}, "test"
    )
    checks = check_kernels(config, torch.device("cpu"))
    assert {check.operator for check in checks} == {"phi", "cmp", "select", "sel", "win", "mix"}
    assert not [check for check in checks if not check.ok]
