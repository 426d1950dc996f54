"""AdamW and Muon: which parameters each moves, and that a run cannot mix them up."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.checks.memory_estimate import estimate
from nsa.config import parse_config
from nsa.data.tokenizers import ByteTokenizer
from nsa.errors import ConfigError
from nsa.train import train
from nsa.train.optimizer import BatchedMuon, divide, hidden_matrices
from nsa.train.state import build_state
from tests.checkpoint.helpers import small, train_until

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture
def cpu_in_fp32(monkeypatch):
    """On a CPU, PyTorch's own Muon then iterates in fp32 as ours does. It calls `bfloat16()`, from 2.15 on `to()`."""
    bfloat16, to = torch.Tensor.bfloat16, torch.Tensor.to

    def to_fp32(tensor, *args, **kwargs):
        if kwargs.get("dtype") == torch.bfloat16 and not tensor.is_cuda:
            kwargs["dtype"] = torch.float32
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda t: bfloat16(t) if t.is_cuda else t.float().clone())
    monkeypatch.setattr(torch.Tensor, "to", to_fp32)


def state_of(*overrides):
    return build_state(small(*overrides), ByteTokenizer())


def test_muon_moves_the_matrices_of_the_blocks_and_adamw_the_rest():
    state = state_of("train.optimizer=muon", "nsa.phi=mlp", "model.qk_norm=true")
    muon, adamw = state.optimizer._parts
    names = {id(parameter): name for name, parameter in state.parameters.items()}
    moved = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert moved | rest == set(names.values())
    assert not moved & rest
    assert {name for name in moved if not name.startswith("blocks.")} == set()
    assert {"embedding.weight", "head.weight", "blocks.0.attention_norm.weight"} <= rest
    assert all(state.parameters[name].dim() == 2 for name in moved)


@pytest.mark.usefixtures("cpu_in_fp32")
def test_a_step_is_that_of_the_two_optimizers_by_hand():
    state, other = (state_of("train.optimizer=muon") for _ in range(2))
    twins = [p for p in other.model.parameters() if not any(p is h for h in hidden_matrices(other.model))]
    options = {"lr": 3e-3, "weight_decay": 0.01}
    muon = torch.optim.Muon(hidden_matrices(other.model), adjust_lr_fn="match_rms_adamw", **options)
    embeddings = {id(other.model.embedding.weight)}
    decayed = [p for p in twins if p.dim() >= 2 and id(p) not in embeddings]
    plain = [p for p in twins if p.dim() < 2 or id(p) in embeddings]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}], lr=3e-3, betas=(0.9, 0.95)
    )
    for group in state.optimizer.param_groups:
        group["lr"] = 3e-3  # as the schedule does
    for step in range(3):
        for one, two in zip(state.model.parameters(), other.model.parameters(), strict=True):
            torch.manual_seed(step)
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        state.optimizer.step()
        muon.step()
        adamw.step()
    for one, two in zip(state.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("cpu_in_fp32")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("options", [{"adjust_lr_fn": "match_rms_adamw"}, {"nesterov": False}], ids=["ours", "others"])
def test_batches_of_matrices_move_as_one_at_a_time(device, options, monkeypatch):
    """Wide, tall and square, a shape that needs several batches, a matrix without a gradient, a changing rate."""
    shapes = [(32, 48), (48, 32), (32, 48), (32, 48), (16, 16), (48, 32), (32, 48), (64, 8)]
    monkeypatch.setattr("nsa.train.optimizer.MOST_ELEMENTS", 3 * 32 * 48)
    starts = [torch.randn(shape, generator=torch.manual_seed(i)).to(device) for i, shape in enumerate(shapes)]
    ours, theirs = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    options = {"lr": 3e-2, "weight_decay": 0.1} | options
    optimizers = BatchedMuon(ours, **options), torch.optim.Muon(theirs, **options)
    for step in range(4):
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            drawn = torch.randn(shapes[i], generator=torch.manual_seed(100 * step + i)).to(device)
            for parameter in pair:
                parameter.grad = None if i == 4 and step == 1 else drawn.clone()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 3e-2 / (1 + step)
            optimizer.step()
    for start, one, two in zip(starts, ours, theirs, strict=True):
        # Products in another order; in bf16 2^-8 of a direction, and moves are near 0.2 each.
        moved = (two - start).norm()
        assert (one - two).norm() <= (4e-3 if device == "cuda" else 1e-5) * moved
        assert moved > 0.01 * start.norm()
        torch.testing.assert_close(
            optimizers[0].state[one]["momentum_buffer"], optimizers[1].state[two]["momentum_buffer"]
        )


def test_muon_on_a_cpu_computes_no_bf16_whatever_its_instructions_are():
    state = state_of("train.optimizer=muon")
    for parameter in state.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    found = []
    products = ("addmm", "baddbmm", "mm", "bmm")

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function.overloadpacket.__name__ in products:
                found.append(result.dtype)
            return result

    with Recorder():
        state.optimizer.step()
    assert set(found) == {torch.float32}


@pytest.mark.parametrize("ranks", [1, 3, 8, 64])
def test_ranks_orthogonalize_equal_shares_of_the_matrices_in_bounded_rounds(ranks):
    shapes = tuple(map(torch.Size, [(512, 2048), (8192, 2048), (64, 64), (2048, 2048), (2048, 8192)] * 16))
    rounds = divide(shapes, ranks, 1 << 25)
    assert sorted(place for shares in rounds for share in shares for place in share) == list(range(len(shapes)))
    assert all(sum(shapes[place].numel() for place in share) <= 1 << 25 for shares in rounds for share in shares)
    work = [
        sum(shapes[place].numel() * min(shapes[place]) for shares in rounds for place in shares[rank])
        for rank in range(ranks)
    ]
    assert max(work) - min(work) <= 8192 * 2048 * 2048, "the work of the largest matrix"
    assert len(rounds) <= 1 + sum(shape.numel() for shape in shapes) / ranks / (1 << 24)


def test_a_run_does_not_resume_with_another_optimizer(tmp_path):
    train_until(3, tmp_path)
    with pytest.raises(ConfigError, match=r"train\.optimizer.*another optimizer"):
        train(small("train.optimizer=muon"), tmp_path, accept_changes=True)


def test_the_memory_estimate_knows_that_muon_keeps_one_moment():
    adamw, muon = (
        estimate(parse_config({}, "test", [f"train.optimizer={name}", "model.n_layers=4"])).parts["optimizer"]
        for name in ("adamw", "muon")
    )
    state = build_state(parse_config({}, "test", ["model.n_layers=4", "runtime.device=cpu"]), ByteTokenizer())
    assert adamw - muon == 4 * sum(matrix.numel() for matrix in hidden_matrices(state.model))
