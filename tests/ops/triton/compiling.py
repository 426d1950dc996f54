"""Compiles every launch that the operators make for given tensors, without a GPU.

The host functions run on meta tensors with a launcher that records, so what is compiled is exactly what
would be launched, and a host function that read a value back from the device would fail. Run as a program (never under
TRITON_INTERPRET), it reads questions, a JSON line each, and answers with what each kernel takes from a multiprocessor.
"""

import io
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.ops import dispatch
from nsa.ops.fused_step import Gate, Source, Write
from nsa.ops.layout import num_slots
from nsa.ops.spec import MSASpec, NSASpec
from nsa.ops.triton import launch_table
from nsa.ops.triton.step_kernels import WIDEST

FILES = (
    "launch_table",
    "compress",
    "compressed",
    "decode",
    "feed_forward",
    "flash",
    "mix",
    "msa_decode",
    "msa_loss",
    "msa_selection",
    "selected",
    "selected_backward",
    "selected_lists",
    "selected_parts",
    "selected_tiles",
    "selection",
    "step_kernels",
)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
MULTIPROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 120: 170}
SEVERAL = {"product_kernel", "dq_kernel"}  # kernels whose launches differ by more than sizes
SPEC = NSASpec()
MSA = MSASpec(num_selected=8)


@dataclass(frozen=True)
class Plan:
    """Tensors of one attention call; `new` makes it one of that many new tokens over a cache of `tokens`."""

    batch: int
    tokens: int
    heads: int
    groups: int
    dk: int
    dv: int
    dtype: str = "bfloat16"
    packed: bool = False
    new: int = 0


@dataclass(frozen=True)
class Taken:
    """spilled: bytes of local memory a thread needs. serialized: the assembler waits for every tensor-core product at
    once (sm_90), which makes a kernel several times slower. tensor_memory: columns of it (sm_100). narrow: strides that
    are multiplied in 32 bits, which overflows in long sequences."""

    arch: int
    kernel: str
    constants: str
    registers: int
    spilled: int
    serialized: bool
    shared: int
    tensor_memory: int
    narrow: list[str]


@contextmanager
def recording(arch: int, *, keep: bool = True) -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Inside, kernels only note their launches, as if on a card of that architecture: (kernel, arguments, options)."""
    launches: list[Any] = []
    card = launch_table.Card(launch_table.card_class(arch), MULTIPROCESSORS[arch])

    def recorder(kernel: Any, grid: tuple[int, ...], x: Tensor) -> Any:
        return lambda *args, **options: launches.append((kernel, args, options)) if keep else None

    # All are imported before the first is patched: a later import would take the recorder for the launcher.
    modules = [import_module(f"nsa.ops.triton.{name}") for name in FILES]
    with ExitStack() as patches:
        for module in modules:
            for name in list(vars(module)):
                if name == "launcher":
                    patches.enter_context(mock.patch.object(module, name, recorder))
                elif name == "card_of":
                    patches.enter_context(mock.patch.object(module, name, return_value=card))
        yield launches


def attend(plan: Plan) -> None:
    """All operators, forward and backward."""
    phi, cmp, select, sel, win, mix = (dispatch.kernels_for(operator) for operator in dispatch.OPERATORS[:6])
    dtype = getattr(torch, plan.dtype)

    def tensor(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    def tokens(heads: int, dim: int) -> Tensor:
        return tensor(plan.batch, plan.tokens, heads, dim)

    borders = tensor(4, kind=torch.int32) if plan.packed else None
    q, k, v, do = (
        tokens(plan.heads, plan.dk),
        tokens(plan.groups, plan.dk),
        tokens(plan.groups, plan.dv),
        tokens(plan.heads, plan.dv),
    )
    slots = num_slots(plan.tokens, SPEC, packed=plan.packed)
    k_cmp = phi.mean(k, SPEC, borders)
    assert k_cmp.shape[1] == slots
    phi.mean_backward(k_cmp, plan.tokens, SPEC, borders)
    weight = tensor(SPEC.cmp_block, plan.dv, plan.dv)
    v_cmp = phi.contract(v, weight, SPEC, borders)
    phi.contract_backward(v_cmp, v, weight, SPEC, borders)
    o, lse = cmp.forward(q, k_cmp, v_cmp, SPEC, borders)
    cmp.backward(do, q, k_cmp, v_cmp, o, lse, SPEC, borders)
    indices = select.forward(q, k_cmp, lse, SPEC, borders)
    o, lse = sel.forward(q, k, v, indices, SPEC.sel_block, borders)
    sel.backward(do, q, k, v, indices, o, lse, SPEC.sel_block, borders)
    o, lse = win.forward(q, k, v, SPEC.window, borders)
    win.backward(do, q, k, v, o, lse, SPEC.window, borders)
    index, index_q, index_k = dispatch.kernels_for("index"), tokens(plan.groups, plan.dk), tokens(1, plan.dk).squeeze(2)
    indices, counted = index.choose(index_q, index_k, MSA, borders), tensor(*q.shape[:2], kind=torch.bool)
    sel.backward(do, q, k, v, indices, o, lse, MSA.block, borders)
    dispatch.kernels_for("index_loss").loss(index_q, index_k, q, k, lse, indices, counted, MSA.block, borders)
    gates = tensor(plan.batch, plan.tokens, plan.heads, 3)
    mix.forward(o, o, o, gates)
    mix.backward(do, o, o, o, gates)
    sums = tensor(3, *q.shape[:3], kind=torch.float32)
    mix.backward(do, o, o, o, gates, sums=sums)
    win.backward(do, q, k, v, o, lse, SPEC.window, borders, sums=sums[0])
    cmp.backward(do, q, k_cmp, v_cmp, o, lse, SPEC, borders, sums=sums[0])
    mix.add_into(q, q, q)
    mlp, x, norm = dispatch.kernels_for("mlp"), tensor(4096, 768, kind=torch.float32), tensor(768, kind=torch.float32)
    mlp.normalize(x, norm, 1e-5, dtype)
    mlp.normalize_backward(tensor(4096, 768), x, norm, 1e-5)
    for activation in ("swiglu", "swiglu_oai"):
        mlp.activate(tensor(4096, 4096), activation)
        mlp.activate_backward(tensor(4096, 2048), tensor(4096, 4096), activation)


def decode(plan: Plan) -> None:
    """A step of an NSA layer with a ring and with pages for the window, of a window layer, of a dense layer and of an
    MSA layer."""
    kernels, dtype, page = dispatch.kernels_for("decode"), getattr(torch, plan.dtype), 64

    def tensor(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    def pool(length: int) -> tuple[Tensor, Tensor]:
        return tuple(tensor(plan.tokens, length, plan.groups, dim) for dim in (plan.dk, plan.dv))

    table = tensor(plan.batch, plan.tokens // page, kind=torch.int32)
    slots = tensor(plan.batch, kind=torch.int32)
    positions = tensor(plan.batch, plan.new, kind=torch.int32)
    q, gates = tensor(plan.batch, plan.new, plan.heads, plan.dk), tensor(plan.batch, plan.new, plan.heads, 3)
    cmp, sel, ring = pool(page // SPEC.cmp_stride), pool(page), pool(SPEC.window + 64)
    for win, places in ((ring, slots), (sel, table)):
        kernels.nsa(q, gates, *cmp, table, *sel, table, *win, places, positions, SPEC)
    kernels.paged(q, *ring, slots, positions, SPEC.window)
    kernels.paged(q, *sel, table, positions, None)
    index_q, index_keys = tensor(plan.batch, plan.new, plan.groups, plan.dk), tensor(plan.tokens, MSA.block, 1, plan.dk)
    pages, msa_table = pool(MSA.block), tensor(plan.batch, plan.tokens // MSA.block, kind=torch.int32)
    msa = dispatch.kernels_for("msa_decode").msa
    msa(q, index_q, *pages, index_keys, msa_table, positions, MSASpec())
    surround(plan, sel, ring, table, slots, positions)


def surround(
    plan: Plan,
    pages: tuple[Tensor, Tensor],
    ring: tuple[Tensor, Tensor],
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> None:
    """What a block computes around the attention of a step: with norms of the heads and rotation of half of each head,
    and without. One activation a plan, since every kernel takes time to compile."""
    step, dtype, tokens = dispatch.kernels_for("step"), getattr(torch, plan.dtype), plan.batch * plan.new
    dim, hidden = plan.heads * plan.dk, min(4 * plan.heads * plan.dk, WIDEST)

    def tensor(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    heads, norm = [(plan.heads, plan.dk)] + [(plan.groups, plan.dk)] * 3 + [(plan.groups, plan.dv)] * 3, tensor(dim)
    weights = [*(tensor(number * size, dim) for number, size in heads), tensor(dim // 8, dim)]
    biases = [*(None for _ in heads), tensor(dim // 8)]
    read = step.product(tensor(tokens, dim), weights, biases, norm=norm, eps=1e-5, activation="silu")
    gate = Gate(read.shape[1] - dim // 8, tensor(3 * plan.heads, dim // 8), tensor(3 * plan.heads), False)
    for scale, pairs in ((None, plan.dk // 2), (tensor(plan.dk), plan.dk // 4)):
        tables = tuple(tensor(plan.batch, plan.new, pairs, kind=torch.float32) for _ in range(2))
        query, key = Source(0, plan.heads, plan.dk, scale), Source(0, plan.groups, plan.dk, scale)
        value = Source(0, plan.groups, plan.dv, None)
        writes = [Write(key, pages[0], False, True), Write(value, pages[1], False, False)]
        writes += [Write(key, ring[0], True, True), Write(value, ring[1], True, False)]
        step.place(read, [query], writes, gate, 1e-5, positions, table, slots, tables)
        index_query, index_key = (Source(0, heads, plan.dk // 2, scale) for heads in (plan.groups, 1))
        index_pages = tensor(*pages[0].shape[:2], 1, plan.dk // 2)
        writes = [*writes[:2], Write(index_key, index_pages, False, True)]
        step.place(read, [query, index_query], writes, None, 1e-5, positions, table, slots, tables)
    x = step.product(tensor(tokens, plan.heads * plan.dv), [tensor(dim, plan.heads * plan.dv)], residual=read)
    activation = "swiglu" if plan.heads == 12 else "swiglu_oai"
    between = step.product(x, [tensor(hidden, dim)] * 2, norm=norm, eps=1e-5, activation=activation)
    step.product(between, [tensor(dim, hidden)], residual=x)


def compile_launch(arch: int, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, str]:
    """The compiled kernel, with the specialisations a real launch would get, and what the assembler said: nothing
    where the kernel was compiled before."""
    options = dict(options)
    launch = {
        name: options.pop(name) for name in ("num_warps", "num_stages", "launch_pdl", "maxnreg") if name in options
    }
    values = dict(zip(kernel.arg_names, args, strict=False)) | options
    signature, constants, attributes = {}, {}, {}
    for place, param in enumerate(kernel.params):
        value = values[param.name]
        if param.is_constexpr or value is None:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[param.name] = TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, tuple):
            signature[param.name] = tuple(TYPES[x.dtype] for x in value)
            attributes |= {(place, number): [["tt.divisibility", 16]] for number in range(len(value))}
        elif isinstance(value, TensorDescriptor):
            kind = TYPES[value.base.dtype].removeprefix("*")
            signature[param.name] = f"tensordesc<{kind}{list(value.block_shape)}>".replace(" ", "")
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        elif value == 1 and not param.do_not_specialize:
            signature[param.name], constants[param.name] = "constexpr", 1
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    with redirect_stdout(io.StringIO()) as said, triton.knobs.nvidia.scope():
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)
    return compiled, said.getvalue()


def tool(name: str, *arguments: str | Path) -> str:
    """What a tool that ships with Triton prints."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def measured(arch: int, key: tuple[str, str], compiled: Any, report: str) -> Taken:
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        binary.write_bytes(compiled.asm["cubin"])
        usage = re.search(r"REG:(\d+) STACK:(\d+)", tool("cuobjdump", "-res-usage", binary))
        assert usage is not None
        if arch == 90 and "wgmma" in compiled.asm["ptx"] and not report:  # what only the assembler says
            source.write_text(compiled.asm["ptx"])
            report = tool("ptxas", "-v", "--gpu-name=sm_90a", source, "-o", binary)
    memory, narrow = compiled.metadata, narrow_strides(compiled.asm["ttir"])
    registers, spilled = int(usage[1]), int(usage[2])
    tensor_memory = int(memory.tmem_size or 0)
    return Taken(arch, *key, registers, spilled, "serialized" in report, int(memory.shared), tensor_memory, narrow)


def narrow_strides(ttir: str) -> list[str]:
    """The stride arguments of a kernel that are factors of a 32-bit product."""
    strides = {name: name for name in re.findall(r"%(stride_\w+|\w+_s[a-z]): i32", ttir)}
    found = set()
    for result, operation, operands, kind in re.findall(r"%(\w+) = ([\w.]+) ([^:{]*?)(?: \{.*\})? : (.*)", ttir):
        used = [strides[name] for name in re.findall(r"%(\w+)", operands) if name in strides]
        if operation == "arith.muli" and "i32" in kind:
            found.update(used)
        elif used and operation in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
            strides[result] = used[0]
    return sorted(found)


def taken(arch: int, plan: Plan, only: Sequence[str] = ()) -> list[Taken]:
    """What each different launch takes; of the kernels in `only`, the first launch alone, or all of SEVERAL."""
    found: dict[tuple[str, str], Taken] = {}
    with recording(arch) as launches:
        (decode if plan.new else attend)(plan)
    for kernel, args, options in launches:
        key = (kernel.__name__, str({k: v for k, v in options.items() if not isinstance(v, Tensor | TensorDescriptor)}))
        is_first = key[0] in SEVERAL or not any(key[0] == name for name, _ in found)
        if key not in found and (not only or (key[0] in only and is_first)):
            found[key] = measured(arch, key, *compile_launch(arch, kernel, args, options))
    return list(found.values())


class Compiler:
    """`taken` for every architecture, in a process of its own: this one may interpret its kernels."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def taken(self, archs: Sequence[int], plan: Plan, only: Sequence[str] = ()) -> list[Taken]:
        if self.process.poll() is not None:
            self.start()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([archs, asdict(plan), only]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, f"the compiler ended with code {self.process.wait()}"
        kernels, failure = json.loads(answer)
        assert not failure, failure
        return [Taken(**kernel) for kernel in kernels]

    def end(self) -> None:
        self.process.communicate()


def answer_questions() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    for line in sys.stdin:
        archs, plan, only = json.loads(line)
        kernels, failure = [], ""
        try:
            kernels = [asdict(kernel) for arch in archs for kernel in taken(arch, Plan(**plan), only)]
        except Exception:
            failure = traceback.format_exc()
        print(json.dumps([kernels, failure]), file=answers, flush=True)


if __name__ == "__main__":
    answer_questions()
