"""Benchmark inputs that a trained model makes, and how much neighbouring queries agree in them."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bench import attention, trained
from bench.shapes import SPEC, Shape, agreement, make_inputs
from nsa.nn.attention import NSAAttention
from nsa.ops import NSASpec
from nsa.ops.dispatch import REFERENCE

SMALL = NSASpec(cmp_block=4, cmp_stride=2, sel_block=4, num_selected=4, num_init=1, num_local=1, window=8)


def test_recorded_inputs_give_the_attention_of_the_layer():
    torch.manual_seed(0)
    layer = NSAAttention(32, 4, 2, 16)
    x = torch.randn(2, 150, 32)
    inputs = trained.layer_inputs(layer, x, torch.float32)
    torch.testing.assert_close(layer.out(attention.attention(inputs).flatten(2)), layer(x))


def blocks(*rows):
    """One row per query: selected blocks in one group."""
    return torch.tensor(rows, dtype=torch.int32)[None, :, None]


def test_agreement_counts_free_blocks_of_queries_that_could_choose():
    # Queries 0 to 15 see at most four blocks of four and select all of them. Block 0 and the newest are forced.
    early = [[0, 1, 2, 3]] * 16
    # Block 4 is the newest: of the free blocks (1, 2), then (1, 3), one is common; then both.
    assert agreement(blocks(*early, [0, 1, 2, 4], [0, 1, 3, 4], [0, 1, 3, 4]), SMALL) == pytest.approx(
        (1.0 + 0.5 + 1.0) / 3
    )
    # A block that was the newest and is free now does not count as common.
    later = blocks(*early, [0, 1, 2, 4], [0, 1, 2, 4], [0, 1, 2, 4], [0, 1, 2, 4], [0, 1, 4, 5])
    assert agreement(later, SMALL) == pytest.approx((1 + 1 + 1 + 1 + 0.5) / 5)
    assert math.isnan(agreement(blocks(*early), SMALL))


def test_correlated_queries_agree_more_than_random_ones():
    shape = Shape(1, 1536, 4, 1, 32)
    shares = [
        attention.neighbours_agree(make_inputs(shape, correlated=correlated, dtype=torch.float32, device="cpu"))
        for correlated in (False, True)
    ]
    assert shares[1] > shares[0] + 0.1


class Rounding:
    """The reference in float64, its results rounded to bf16; `factor` spoils the output that backward is given."""

    def __init__(self, operator, factor=1.0):
        self.operator, self.factor = REFERENCE[operator], factor

    @staticmethod
    def rounded(t):
        kept = torch.float32 if t.dim() == 3 else torch.bfloat16  # the log-sum-exp is never rounded
        return t.to(kept) if t.is_floating_point() else t

    def __getattr__(self, name):
        def call(*arguments):
            spoiled = list(arguments)
            if name == "backward" and len(arguments) > 6:  # of a branch: ..., o, lse, spec, cu_seqlens
                spoiled[-4] = self.factor * spoiled[-4]
            exact = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in spoiled]
            return tree_map(self.rounded, getattr(self.operator, name)(*exact))

        return call


@pytest.mark.parametrize(("factor", "wrong"), [(1.0, []), (1.02, ["cmp.dq", "sel.dq", "win.dq"])])
def test_keys_with_much_in_common_pass_the_check_and_a_wrong_gradient_does_not(factor, wrong, monkeypatch):
    """As in a trained layer: rounding o moves dq by more than the limit, and a kernel is not to blame for it."""
    monkeypatch.setattr(attention, "kernels_for", lambda operator: Rounding(operator, factor))

    def make(shape, seed):
        x = make_inputs(shape, correlated=False, device="cpu", seed=seed)
        common = torch.randn(2, 1, 1, 1, shape.dim, generator=torch.manual_seed(seed))
        for k, v in ((x.k_cmp, x.v_cmp), (x.k_sel, x.v_sel), (x.k_win, x.v_win)):
            k.data += common[0]
            v.data += common[1]
        return x

    errors = attention.check(Shape(1, 700, 4, 2, 32), make)
    assert {*wrong} <= {*attention.wrong(errors, torch.bfloat16)}
    assert wrong or not attention.wrong(errors, torch.bfloat16), errors


@pytest.fixture
def recording(tmp_path, monkeypatch):
    from nsa.config import load_config
    from nsa.data.tokenizers import ByteTokenizer
    from nsa.nn.model import build_model
    from nsa.train.trained import TrainedRun

    monkeypatch.setattr(trained, "texts", lambda *, kept: iter(["def f(x):\n    return x\n" * 40] * 9))
    config = load_config(
        "configs/quickstart.yaml",
        ["model.dim=32", "model.n_heads=2", "model.n_kv_heads=1", "model.head_dim_k=16", "model.head_dim_v=16",
         "model.n_layers=3", "train.seq_len=256", *(f"nsa.{key}={getattr(SPEC, key)}" for key in vars(SPEC)),
         "nsa.phi=mean"],
    )  # fmt: skip
    model = build_model(config, 257, 0)
    monkeypatch.setattr(
        trained, "load_run", lambda run: TrainedRun(model.eval(), ByteTokenizer(), config, tmp_path / "weights")
    )
    return trained.Recording(tmp_path)


def test_a_run_serves_its_own_heads_up_to_the_length_it_was_trained_at(recording):
    assert recording.refusal(Shape(2, 256, 2, 1, 16)) is None
    assert "heads of 2/1/16" in recording.refusal(Shape(1, 256, 12, 2, 64))
    assert "trained at 256 tokens" in recording.refusal(Shape(1, 512, 2, 1, 16))
    assert set(attention.makers_of(Shape(1, 256, 2, 1, 16), ["random", "trained"], recording)) == {"random", "trained"}
    assert set(attention.makers_of(Shape(1, 512, 2, 1, 16), ["random", "trained"], recording)) == {"random"}


def test_a_recording_is_of_the_text_and_the_layer_asked_for(recording):
    x = recording.inputs(Shape(2, 128, 2, 1, 16), torch.float32)
    assert x.q.shape == (2, 128, 2, 16)
    assert x.k_sel.shape == (2, 128, 1, 16)
    assert all(leaf.requires_grad for leaf in x.all())
    assert not torch.equal(x.q[0], x.q[1])
    assert len(recording.agreements(128)) == 3


def test_too_little_text_is_said(recording):
    recording.longest = 1 << 20
    with pytest.raises(SystemExit, match="tokens of text only"):
        recording.inputs(Shape(1, 1 << 15, 2, 1, 16))
