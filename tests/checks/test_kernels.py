"""The check of the kernels finds wrong ones and raises no false alarm, however short the sequences of a run are."""

import pytest
import torch

from nsa.checks.kernels import KernelCheck, check_kernels
from nsa.config import parse_config
from nsa.ops.reference import msa_index, selection

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


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("seq_len", [16, 100, 300])
def test_sound_kernels_of_msa_pass_where_queries_choose_and_where_they_do_not(seq_len, isolate):
    sections = {"model": {**MODEL, "attention": "msa"}, "msa": {"block": 32, "num_selected": 4, "index_dim": 32}}
    config = parse_config({**sections, "data": {"isolate_documents": isolate}, "train": {"seq_len": seq_len}}, "test")
    checks = check_kernels(config, torch.device("cpu"))
    assert {check.operator for check in checks} == {"index", "index_loss", "sel", "win"}
    gradients = {check.part for check in checks if check.operator == "index_loss"}
    assert {"output", "gradient of index_q", "gradient of index_k by differences"} <= gradients
    assert not [check for check in checks if not check.ok]


def test_a_result_that_is_not_a_number_is_wrong():
    assert KernelCheck("sel", "output", "triton", error=4e-3, limit=5e-3).ok
    assert not KernelCheck("sel", "output", "triton", error=float("nan"), limit=5e-3).ok


def test_a_selection_of_other_blocks_is_wrong(monkeypatch):
    right = selection.forward

    def forward(q, *args, **options):
        indices = right(q, *args, **options)
        return indices if q.dtype == torch.float64 else indices.flip(1)  # float64 is what it is compared with

    monkeypatch.setattr(selection, "forward", forward)
    config = parse_config({"model": MODEL, "train": {"seq_len": 1024}}, "test")
    wrong = [check for check in check_kernels(config, torch.device("cpu")) if not check.ok]
    assert [(check.operator, check.part) for check in wrong] == [("select", "rows with other blocks")]


def test_a_wrong_gradient_of_the_index_is_found(monkeypatch):
    right = msa_index.loss

    def loss(*args, **options):
        kl, d_index_q, d_index_k = right(*args, **options)
        return kl, d_index_q, d_index_k if args[0].dtype == torch.float64 else 1.1 * d_index_k

    monkeypatch.setattr(msa_index, "loss", loss)
    config = parse_config({"model": {**MODEL, "attention": "msa"}, "train": {"seq_len": 256}}, "test")
    wrong = [check for check in check_kernels(config, torch.device("cpu")) if not check.ok]
    assert [(check.operator, check.part) for check in wrong] == [("index_loss", "gradient of index_k")]
