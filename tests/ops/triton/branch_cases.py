"""What the tests of the compressed and the window kernels share: inputs and comparison."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import Tensor

from nsa.ops.layout import num_slots
from nsa.ops.reference import compressed as reference_compressed
from nsa.ops.reference import windowed as reference_windowed
from nsa.ops.spec import NSASpec
from nsa.ops.triton import flash
from nsa.ops.triton.compressed import compressed
from nsa.ops.triton.launch_table import Launch
from nsa.ops.triton.windowed import windowed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
SPEC = NSASpec(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=4, window=20)
SMALL = Launch(rows=32, columns=16, num_warps=4, num_stages=1)
BRANCHES = {"cmp": (compressed, reference_compressed), "win": (windowed, reference_windowed)}


@dataclass(frozen=True)
class Case:
    """One comparison of a kernel with the reference. `borders` packs documents, `splits` is the number of parts of dK
    and dV where it is not chosen by the card."""

    tokens: int = 40
    heads: int = 4
    groups: int = 2
    dk: int = 16
    dv: int = 16
    batch: int = 1
    dtype: torch.dtype = torch.float32
    spec: NSASpec = SPEC
    launch: Launch | None = SMALL
    splits: int = 0
    borders: tuple[int, ...] | None = None

    def cu_seqlens(self) -> Tensor | None:
        return None if self.borders is None else torch.tensor(self.borders, dtype=torch.int32, device=DEVICE)


def inputs(branch: str, case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the output's gradient."""
    generator = torch.Generator().manual_seed(0)
    keys = case.tokens
    if branch == "cmp":
        keys = num_slots(case.tokens, case.spec, packed=case.borders is not None)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, case.dtype)

    return (
        draw(case.batch, case.tokens, case.heads, case.dk),
        draw(case.batch, keys, case.groups, case.dk),
        draw(case.batch, keys, case.groups, case.dv),
        draw(case.batch, case.tokens, case.heads, case.dv),
    )


def size_of(branch: str, spec: NSASpec) -> NSASpec | int:
    """What a branch takes of a spec."""
    return spec if branch == "cmp" else spec.window


def run_kernels(branch: str, case: Case, tensors: tuple[Tensor, ...], *, gives_sums: bool = False) -> dict[str, Tensor]:
    """`gives_sums`: the row sums of do * o are given to the backward pass, and o is NaN."""
    tuned = dict.fromkeys(("forward", "dq", "dkv"), case.launch) if case.launch else {}
    kernels = replace(BRANCHES[branch][0], tuned=tuned)
    q, k, v, do = tensors
    borders = case.cu_seqlens()
    o, lse = kernels.forward(q, k, v, size_of(branch, case.spec), borders)
    output, known = o, {}
    if gives_sums:
        known, o = {"sums": (do.float() * o.float()).sum(3)}, torch.full_like(o, torch.nan)
    splits = mock.patch.object(flash, "num_splits", return_value=case.splits) if case.splits else nullcontext()
    with splits:
        grads = kernels.backward(do, q, k, v, o, lse, size_of(branch, case.spec), borders, **known)
    return dict(zip(("o", "lse", "dq", "dk", "dv"), (output, lse, *grads), strict=True))


def run_reference(branch: str, case: Case, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    module = BRANCHES[branch][1]
    q, k, v, do = (x.double() for x in tensors)
    borders = case.cu_seqlens()
    o, lse = module.forward(q, k, v, size_of(branch, case.spec), borders)
    grads = module.backward(do, q, k, v, o, lse, size_of(branch, case.spec), borders)
    return dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *grads), strict=True))


def assert_agrees(branch: str, case: Case, tensors: tuple[Tensor, ...] | None = None) -> None:
    """Outputs and all gradients against the reference in float64, and rows that see nothing."""
    tensors = tensors or inputs(branch, case)
    got, wanted = run_kernels(branch, case, tensors), run_reference(branch, case, tensors)
    blind = wanted["lse"] == -torch.inf
    assert torch.equal(got["lse"] == -torch.inf, blind)
    assert (got["o"][blind] == 0).all()
    for name, want in wanted.items():
        have = got[name]
        assert have.shape == want.shape
        assert have.dtype == (torch.float32 if name == "lse" else case.dtype)
        if name == "lse":
            have, want = have[~blind], want[~blind]
        # A gradient can be exactly 0 (one visible key): then its size is that of the terms that cancel.
        floor = 0.1 * want.numel() ** 0.5 if name in ("dq", "dk") else 0.0
        error = float((have.double() - want).norm()) / max(float(want.norm()), floor, 1e-30)
        assert error <= LIMIT[case.dtype], f"{name}: {error:.1e} ({case})"
