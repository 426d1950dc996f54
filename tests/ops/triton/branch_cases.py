"""What the tests of the compressed and the window kernels share: inputs, comparison, compilation.

Run as a script, it compiles the kernels of one branch for one architecture with the checked-in launch
parameters and prints what they take, one JSON object a line. That needs a process of its own, since the
interpreter that the other tests use is switched on for a whole process.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nsa.ops.layout import num_slots
from nsa.ops.reference import compressed as cmp_reference
from nsa.ops.reference import window as win_reference
from nsa.ops.spec import NSASpec
from nsa.ops.triton import common, flash
from nsa.ops.triton import compressed as cmp_triton
from nsa.ops.triton import window as win_triton
from nsa.ops.triton.common import Launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
SPEC = NSASpec(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=4, window=20)
SMALL = Launch(block_m=32, block_n=16, num_warps=4, num_stages=1)
BRANCHES: dict[str, tuple[ModuleType, ModuleType]] = {
    "cmp": (cmp_triton, cmp_reference),
    "win": (win_triton, win_reference),
}


@dataclass(frozen=True)
class Case:
    """One comparison of a kernel with its twin. `borders` packs documents."""

    tokens: int = 40
    heads: int = 4
    groups: int = 2
    dk: int = 16
    dv: int = 16
    batch: int = 1
    dtype: torch.dtype = torch.float32
    spec: NSASpec = SPEC
    launch: Launch | None = SMALL
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


def run_kernels(branch: str, case: Case, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    module = BRANCHES[branch][0]
    q, k, v, do = tensors
    borders = case.cu_seqlens()
    o, lse = module.forward(q, k, v, case.spec, borders, case.launch)
    grads = module.backward(do, q, k, v, o, lse, case.spec, borders, case.launch, case.launch)
    return dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *grads), strict=True))


def run_reference(branch: str, case: Case, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    module = BRANCHES[branch][1]
    q, k, v, do = (x.double() for x in tensors)
    borders = case.cu_seqlens()
    o, lse = module.forward(q, k, v, case.spec, borders)
    grads = module.backward(do, q, k, v, o, lse, case.spec, borders)
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


def poison(monkeypatch: Any) -> None:
    """Fills every new float tensor with NaN, so that an element nobody writes is seen."""

    def poisoned(make: Any) -> Any:
        def filled(*args: Any, **kwargs: Any) -> Tensor:
            x: Tensor = make(*args, **kwargs)
            return x.fill_(torch.nan) if x.is_floating_point() and x.device.type != "meta" else x

        return filled

    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


# (H, G, Dk, Dv): the shapes whose production kernels are compiled.
SHAPES = ((64, 4, 128, 128), (12, 2, 64, 64))
WIDE_SHAPES = ((64, 4, 192, 128), (16, 4, 256, 256), (32, 8, 96, 80))


def production_calls(
    branch: str, arch: int, shape: tuple[int, int, int, int], dtype: torch.dtype, packed: bool
) -> list[common.Call]:
    """The launches of a forward and a backward pass on such a card, planned for tensors without memory."""
    heads, groups, dk, dv = shape
    module = BRANCHES[branch][0]
    tokens = 4096
    keys = num_slots(tokens, NSASpec(), packed=packed) if branch == "cmp" else tokens

    def empty(*sizes: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*sizes, dtype=kind, device="meta")

    q, k, v = empty(1, tokens, heads, dk), empty(1, keys, groups, dk), empty(1, keys, groups, dv)
    sight = module.sight(q, NSASpec(), None)
    if packed:
        sight = replace(sight, lo=empty(tokens, kind=torch.int32), hi=empty(tokens, kind=torch.int32))
    launch = {kind: common.launch_params(f"{branch}_{kind}", arch, dk, dv, dtype) for kind in ("forward", "dq", "dkv")}
    o, lse, calls = flash.plan_forward(q, k, v, sight, launch["forward"])
    dkv = replace(launch["dkv"], splits=2)
    _, _, _, more = flash.plan_backward(o, q, k, v, o, lse, sight, launch["dq"], dkv)
    return calls + more[:3]


def compiled_resources(branch: str, arch: int, *, wide: bool) -> list[dict[str, Any]]:
    """What the production kernels take, compiled in another process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, __file__, branch, str(arch), "wide" if wide else "usual"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _main(branch: str, arch: int, which: str) -> None:
    plans = [(shape, torch.bfloat16, False) for shape in (WIDE_SHAPES if which == "wide" else SHAPES)]
    if which == "wide":
        plans += [(SHAPES[0], torch.bfloat16, True), (SHAPES[1], torch.float32, False)]
    for shape, dtype, packed in plans:
        for call in production_calls(branch, arch, shape, dtype, packed):
            found = asdict(common.compile_call(call, arch))
            print(json.dumps({"shape": shape, "dtype": str(dtype), "packed": packed, **found}))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
