"""What the Triton modules share on the host: launch parameters, planned launches, refusals.

Launch parameters are fixed tables, keyed by (kernel, architecture, head-size class, element size): nothing is
tuned at run time. A launch is planned as a `Call` before it runs, so that the same plan can be compiled for a
card that is not there and its registers and shared memory read.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Launch:
    """How one kernel is cut and scheduled.

    block_m     rows of a query tile (queries x heads of a group)
    block_n     keys of a tile
    num_warps   warps of a program
    num_stages  depth of the software pipeline over tiles
    mask        "split": separate loops for the masked edges and the unmasked inside; "branch": one loop, the
                mask computed only in tiles that need it; "always": one loop, always masked
    splits      programs that share the queries of one key tile (dK/dV only); 0: chosen by the card's size
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    mask: str = "split"
    splits: int = 0


# (kernel, architecture, head-size class), 16-bit types. Classes: both head sizes up to 64; up to 128; keys
# over 128 beside values up to 128 (192); up to 256. Two traps that the tests look for: a split loop that the
# assembler serializes on sm_90 (see `Resources`), and a branch that makes it spill on sm_80.
_LAUNCH_16: dict[tuple[str, int, int], Launch] = {
    ("cmp_forward", 90, 64): Launch(128, 64, 4, 3, "branch"),
    ("cmp_forward", 90, 128): Launch(128, 128, 8, 3, "branch"),
    ("cmp_forward", 90, 192): Launch(128, 64, 8, 2),
    ("cmp_forward", 90, 256): Launch(64, 64, 8, 2),
    ("cmp_dq", 90, 64): Launch(64, 32, 4, 4),
    ("cmp_dq", 90, 128): Launch(64, 64, 4, 2),
    ("cmp_dq", 90, 192): Launch(128, 32, 8, 2),
    ("cmp_dq", 90, 256): Launch(64, 32, 8, 2),
    ("cmp_dkv", 90, 64): Launch(64, 64, 4, 2, "branch"),
    ("cmp_dkv", 90, 128): Launch(64, 128, 8, 3),
    ("cmp_dkv", 90, 192): Launch(32, 64, 8, 2),
    ("cmp_dkv", 90, 256): Launch(32, 64, 8, 2),
    ("win_forward", 90, 64): Launch(128, 64, 4, 3, "branch"),
    ("win_forward", 90, 128): Launch(64, 64, 4, 3, "branch"),
    ("win_forward", 90, 192): Launch(128, 64, 8, 2, "branch"),
    ("win_forward", 90, 256): Launch(64, 64, 8, 2, "branch"),
    ("win_dq", 90, 64): Launch(128, 32, 8, 3, "branch"),
    ("win_dq", 90, 128): Launch(64, 64, 4, 2, "branch"),
    ("win_dq", 90, 192): Launch(128, 32, 8, 2, "branch"),
    ("win_dq", 90, 256): Launch(64, 32, 8, 2),
    ("win_dkv", 90, 64): Launch(64, 64, 4, 2, "branch"),
    ("win_dkv", 90, 128): Launch(64, 128, 8, 3, "branch"),
    ("win_dkv", 90, 192): Launch(32, 64, 8, 2, "always"),
    ("win_dkv", 90, 256): Launch(32, 64, 8, 2, "always"),
    ("cmp_forward", 80, 64): Launch(128, 64, 8, 3),
    ("cmp_forward", 80, 128): Launch(128, 64, 8, 2),
    ("cmp_forward", 80, 192): Launch(64, 32, 4, 2),
    ("cmp_forward", 80, 256): Launch(64, 32, 8, 2),
    ("cmp_dq", 80, 64): Launch(128, 64, 8, 2),
    ("cmp_dq", 80, 128): Launch(128, 32, 8, 2),
    ("cmp_dq", 80, 192): Launch(64, 32, 8, 1),
    ("cmp_dq", 80, 256): Launch(64, 32, 8, 1),
    ("cmp_dkv", 80, 64): Launch(64, 128, 8, 2),
    ("cmp_dkv", 80, 128): Launch(64, 64, 8, 2),
    ("cmp_dkv", 80, 192): Launch(32, 64, 8, 1),
    ("cmp_dkv", 80, 256): Launch(32, 64, 8, 1),
    ("win_forward", 80, 64): Launch(64, 64, 4, 3),
    ("win_forward", 80, 128): Launch(128, 64, 8, 2),
    ("win_forward", 80, 192): Launch(64, 32, 4, 2),
    ("win_forward", 80, 256): Launch(64, 32, 8, 2),
    ("win_dq", 80, 64): Launch(128, 64, 8, 2),
    ("win_dq", 80, 128): Launch(128, 32, 8, 2),
    ("win_dq", 80, 192): Launch(64, 32, 8, 1),
    ("win_dq", 80, 256): Launch(64, 32, 8, 1),
    ("win_dkv", 80, 64): Launch(32, 64, 4, 2),
    ("win_dkv", 80, 128): Launch(64, 64, 8, 2),
    ("win_dkv", 80, 192): Launch(32, 64, 8, 1),
    ("win_dkv", 80, 256): Launch(32, 64, 8, 1),
}

# float32 multiplies without tensor cores ("ieee"): small tiles, whatever the card.
_LAUNCH_32: dict[int, Launch] = {
    64: Launch(32, 32, 8, 1),
    128: Launch(32, 16, 8, 1),
    256: Launch(16, 16, 8, 1),
}

# Cards with 100 KiB of shared memory or less run the sm_80 tables with one pipeline stage less.
_SMALL_CARDS = (86, 87, 89, 120, 121)


def launch_params(kind: str, arch: int, dk: int, dv: int, dtype: torch.dtype) -> Launch:
    """The checked-in parameters of kernel `kind` on a card of compute capability `arch` (90 for 9.0)."""
    size = max(64, padded(dk), padded(dv))
    if dtype == torch.float32:
        return _LAUNCH_32[size]
    if size == 256 and dv <= 128:
        size = 192
    table = 90 if arch >= 90 and arch not in _SMALL_CARDS else 80
    launch = _LAUNCH_16[kind, table, size]
    if arch in _SMALL_CARDS:
        return replace(launch, num_stages=max(1, launch.num_stages - 1))
    return launch


def padded(size: int) -> int:
    """The power of two that holds a head size; products need at least 16."""
    return max(16, int(triton.next_power_of_2(size)))


def arch_of(x: Tensor) -> int:
    """Compute capability of x's card; the interpreter counts as sm_80."""
    if not x.is_cuda:
        return 80
    major, minor = torch.cuda.get_device_capability(x.device)
    return major * 10 + minor


def multiprocessors(x: Tensor) -> int:
    """How many programs x's card runs side by side, at least."""
    if not x.is_cuda:
        return 1
    return int(torch.cuda.get_device_properties(x.device).multi_processor_count)


def unit_last(x: Tensor) -> Tensor:
    """x with its last dimension dense; the other strides stay as they are."""
    return x if x.stride(-1) == 1 else x.contiguous()


def refusal(q: Tensor, v: Tensor) -> str | None:
    """Why no attention kernel here can run tensors like q [B,S,H,Dk] and v [B,N,G,Dv]; None when they can."""
    if q.dtype not in DTYPES:
        name = str(q.dtype).removeprefix("torch.")
        return f"the Triton kernels compute float16, bfloat16 and float32, not {name}"
    if not q.is_cuda and q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    if q.is_cuda and arch_of(q) < 80:
        return f"the Triton kernels need compute capability 8.0 or more, this card has {arch_of(q) / 10}"
    if max(q.shape[3], v.shape[3]) > 256 or q.shape[3] % 16 or v.shape[3] % 16:
        return f"head sizes must be multiples of 16 up to 256, got {q.shape[3]} and {v.shape[3]}"
    if q.shape[1] * q.shape[2] >= 2**31:
        return "more than 2^31 query rows in one sequence"
    return None


@dataclass(frozen=True)
class Call:
    """One kernel launch, planned: `run` starts it, `compile_call` only compiles it."""

    kernel: Any
    programs: int
    args: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 1
    where: Tensor | None = field(default=None, repr=False)


def run(calls: Iterable[Call]) -> None:
    for call in calls:
        if call.programs == 0:
            continue
        with _device_of(call.where):
            call.kernel[(call.programs,)](**call.args, num_warps=call.num_warps, num_stages=call.num_stages)


def _device_of(x: Tensor | None) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x is not None and x.is_cuda else nullcontext()


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes from a multiprocessor.

    registers     per thread
    spilled       bytes of local memory per thread
    serialized    the assembler waits for every tensor-core product at once (sm_90): several times slower
    shared_bytes  shared memory of one program
    """

    name: str
    registers: int
    spilled: int
    serialized: bool
    shared_bytes: int


def compile_call(call: Call, arch: int) -> Resources:
    """Compiles a planned launch for a card that need not be present, as the launch itself would."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature, constants, attributes = {}, {}, {}
    for place, param in enumerate(call.kernel.params):
        value = call.args[param.name]
        if param.is_constexpr or value is None:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[param.name] = "*" + _type_name(value.dtype)
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        elif value == 1 and not param.do_not_specialize:
            signature[param.name], constants[param.name] = "constexpr", 1
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[(place,)] = [["tt.divisibility", 16]]
    compiled = compile(
        ASTSource(call.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": call.num_warps, "num_stages": call.num_stages},
    )
    report = _assembler_report(compiled.asm["ptx"])
    registers = re.search(r"Used (\d+) registers", report)
    stack = re.search(r"(\d+) bytes stack frame", report)
    assert registers is not None, report
    assert stack is not None, report
    return Resources(
        name=call.kernel.__name__,
        registers=int(registers[1]),
        spilled=int(stack[1]),
        serialized="serialized" in report,
        shared_bytes=compiled.metadata.shared,
    )


def _type_name(dtype: torch.dtype) -> str:
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32"}
    return names[dtype]


def _assembler_report(ptx: str) -> str:
    """What the assembler that ships with Triton says of one kernel."""
    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "ptxas"
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(tool), "-v", f"--gpu-name={target[1]}", str(source), "-o", f"{folder}/kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
        return done.stderr
