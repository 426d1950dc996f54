"""Compiles every launch that selected attention makes for given shapes, without a GPU.

Run as a program (never under TRITON_INTERPRET): prints one JSON line per kernel and architecture with its
registers, spilled bytes and shared memory. The host functions run on meta tensors with the kernels replaced by
recorders, so what is compiled is exactly what would be launched.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nsa.ops.spec import NSASpec
from nsa.ops.triton import selected, selected_backward, selected_lists, selected_query_grads, selected_tiles

MODULES = (selected, selected_backward, selected_lists, selected_query_grads, selected_tiles)
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Recorder:
    """Stands in for a kernel and keeps the arguments of its launches."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launches.append((self.kernel, args, options))


def record(arch: int, call: Any) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    kept = []
    for module in MODULES:
        for name, value in list(vars(module).items()):
            if name.endswith("_kernel"):
                kept.append((module, name, value))
                setattr(module, name, Recorder(value, launches))
            if name == "architecture":
                kept.append((module, name, value))
                setattr(module, name, lambda device: arch)
    try:
        call()
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
    return launches


def compile_launch(arch: int, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The compiled kernel, with the specialisations a real launch would get."""
    options = dict(options)
    launch = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
    values = dict(zip(kernel.arg_names, args, strict=False)) | options
    signature, constants, attrs = {}, {}, {}
    for place, param in enumerate(kernel.params):
        value = values[param.name]
        if param.is_constexpr:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
            attrs[place,] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        elif value == 1 and not param.do_not_specialize:
            signature[param.name], constants[param.name] = "constexpr", 1
        else:
            signature[param.name] = "i32" if abs(value) < 1 << 31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attrs[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)


def resources(arch: int, ptx: str) -> tuple[int, int]:
    """(registers, spilled bytes) of a kernel, from ptxas."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    target = "sm_90a" if arch == 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        report = subprocess.run(
            [ptxas, "-v", f"-arch={target}", file, "-o", Path(folder, "kernel.cubin")],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", report))
    found = re.search(r"Used (\d+) registers", report)
    assert found
    return int(found.group(1)), spilled


def attention(
    batch: int, tokens: int, heads: int, groups: int, dk: int, dv: int, dtype: torch.dtype, spec: NSASpec,
    params: Any = None, backward_params: Any = None, packed: bool = False,
) -> None:  # fmt: skip
    """Forward and backward on meta tensors: every launch, nothing computed."""

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    q, k = tensor(batch, tokens, heads, dk), tensor(batch, tokens, groups, dk)
    v, do = tensor(batch, tokens, groups, dv), tensor(batch, tokens, heads, dv)
    indices = tensor(batch, tokens, groups, spec.num_selected, dtype=torch.int32)
    borders = tensor(4, dtype=torch.int32) if packed else None
    o, lse = selected.forward(q, k, v, indices, spec, borders, params=params)
    selected.backward(do, q, k, v, indices, o, lse, spec, borders, params=backward_params)


def report(arch: int, *shape: Any, **params: Any) -> None:
    seen = set()
    for kernel, args, options in record(arch, lambda: attention(*shape, **params)):
        if (kernel.__name__, str(options)) in seen:
            continue
        seen.add((kernel.__name__, str(options)))
        compiled = compile_launch(arch, kernel, args, options)
        registers, spilled = resources(arch, compiled.asm["ptx"])
        line = {
            "arch": arch,
            "kernel": kernel.__name__,
            "rows": options.get("ROWS"),
            "warps": options.get("num_warps", 4),
            "registers": registers,
            "spilled": spilled,
            "shared": compiled.metadata.shared,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    arch, *numbers = (int(n) for n in sys.argv[1:8])
    report(arch, *numbers, getattr(torch, sys.argv[8]), NSASpec(), packed="packed" in sys.argv)
