"""The gated mix on Triton, forward and backward, against plain float64 arithmetic.

Runs in the interpreter on a machine without a GPU, on the GPU otherwise. As a script it compiles the kernels
for both architectures and prints what they need; the last test starts that in a process of its own, because
the interpreter is a property of a process.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import triton

from nsa.ops.reference import mix as reference
from nsa.ops.spec import NSASpec
from nsa.ops.triton import mix

INTERPRET = __name__ != "__main__" and not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRET else "cuda"
TYPES = [torch.float32, torch.float16] + ([] if INTERPRET else [torch.bfloat16])
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh memory holds NaN: whatever is not written shows."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))


def tensors(shape, dtype, gate_dtype):
    generator = torch.Generator().manual_seed(0)
    branches = [torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for _ in range(4)]
    gates = torch.rand(*shape[:3], 3, generator=generator).to(gate_dtype).to(DEVICE)
    return branches[:3], gates, branches[3]


def check(branches, gates, do, params=None):
    exact = [x.double() for x in (*branches, gates)]
    got = [mix.forward(*branches, gates, params), *mix.backward(do, *branches, gates, params)]
    want = [reference.forward(*exact), *reference.backward(do.double(), *exact)]
    for result, wanted, like in zip(got, want, (do, *branches, gates), strict=True):
        assert result.dtype == like.dtype
        assert result.shape == like.shape
        assert result.is_contiguous()
        error = (result.double() - wanted).norm() / wanted.norm()
        assert error <= TOLERANCE[like.dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.float16])
def test_types_of_branches_and_gates(dtype, gate_dtype):
    branches, gates, do = tensors((2, 17, 6, 32), dtype, gate_dtype)
    check(branches, gates, do)


@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 65, 3, 48), (1, 63, 12, 128), (3, 5, 2, 256)])
def test_every_shape(shape):
    branches, gates, do = tensors(shape, torch.float32, torch.float32)
    check(branches, gates, do, mix.Params(elements=512))


def test_strides_do_not_matter():
    branches, gates, do = tensors((2, 19, 4, 32), torch.float32, torch.float32)
    heads_first = branches[0].transpose(1, 2).contiguous().transpose(1, 2)
    spread = torch.stack([branches[1]] * 2, dim=-1)[..., 0]
    gates_apart = gates.movedim(3, 0).contiguous().movedim(0, 3)
    check([heads_first, spread, branches[2]], gates_apart, do[:, :, :1].expand_as(do))
    check(branches, gates, torch.ones((), device=DEVICE).expand_as(do))


def test_nothing_to_mix():
    branches, gates, do = tensors((2, 0, 4, 32), torch.float32, torch.float32)
    assert mix.forward(*branches, gates).shape == do.shape
    assert mix.backward(do, *branches, gates)[3].shape == gates.shape


def test_float64_is_refused_with_a_reason():
    v = torch.zeros(1, 4, 2, 16, dtype=torch.float64)
    assert "float64" in (mix.refusal(v, v, NSASpec()) or "")
    assert mix.refusal(v.float(), v.float(), NSASpec()) is None


# What the kernels need, compiled without a GPU.

LIMITS = {90: 227 * 1024, 80: 163 * 1024}
ALIGNED = {f"stride_{tensor}{dim}" for tensor in "dcsw" for dim in "bsh"}
NUM_COMPILED = 2 * 2 * 2


def compile_kernel(fn, types, constants, arch, **options):
    """Registers, bytes spilled and shared memory of one kernel, with every stride a multiple of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in fn.arg_names}
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind[0] == "*" or name in ALIGNED]
    source = ASTSource(
        fn, signature, constexprs=dict(constants), attrs={(i,): [["tt.divisibility", 16]] for i in aligned}
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "kernel.ptx"
        code.write_text(kernel.asm["ptx"])
        name = {90: "sm_90a", 80: "sm_80"}[arch]
        command = [str(ptxas), "-v", "--gpu-name", name, str(code), "-o", str(code.with_suffix(".cubin"))]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = re.search(r"Used (\d+) reg", report), re.search(r"(\d+) bytes spill stores", report)
    assert registers
    assert spills
    return {
        "kernel": fn.__name__,
        "arch": arch,
        "registers": int(registers[1]),
        "spills": int(spills[1]),
        "shared": kernel.metadata.shared,
    }


def compile_all():
    names = ("o_cmp", "o_sel", "o_win", "o", "do", "do_cmp", "do_sel", "do_win")
    types = dict.fromkeys(names, "*bf16") | {"gates": "*fp32", "dgates": "*fp32"}
    for arch in (90, 80):
        for dim in (64, 128):
            for fn, params in ((mix._mix_kernel, mix._FORWARD), (mix._mix_backward_kernel, mix._BACKWARD)):
                padded, rows, warps = mix.tile(dim, params)
                constants = {"D": dim, "DP": padded, "ROWS": rows}
                yield compile_kernel(fn, types, constants, arch, num_warps=warps)


def test_kernels_fit_both_architectures():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == NUM_COMPILED
    for report in reports:
        assert report["shared"] <= LIMITS[report["arch"]], report
        assert report["spills"] <= 16, report


if __name__ == "__main__":
    for line in compile_all():
        print(json.dumps(line))
