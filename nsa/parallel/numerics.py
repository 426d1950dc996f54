"""The process-wide settings of PyTorch that affect the results of a run, and the precision of the device.

A run sets them from its configuration when it starts and restores the caller's values when it ends, so that its results
do not depend on what the process did before.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import psutil
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.config.schema import RuntimeConfig
from nsa.parallel.compile_cache import use_compile_cache

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Switch = tuple[Callable[[], Any], Callable[[Any], Any], Any]  # getter, setter, the value that a run needs
_CUDA_MATMUL, _MKLDNN = torch.backends.cuda.matmul, cast(Any, torch.backends.mkldnn)
_TF32, _IEEE = ("high", "tf32", "ieee"), ("highest", "ieee", "ieee")  # see _matmul_precision
_SDPA_BACKENDS = [
    *(SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH),
]


@contextmanager
def numerics(runtime: RuntimeConfig) -> Iterator[None]:
    """Inside, PyTorch computes as in a fresh process with this configuration."""
    if runtime.compile:
        use_compile_cache()  # first: PyTorch chooses its own folder as soon as something imports its compiler
    with ExitStack() as restored:
        for get, set_to, value in _switches(runtime):
            restored.callback(set_to, get())
            set_to(value)
        restored.enter_context(sdpa_kernel(_SDPA_BACKENDS))
        if runtime.deterministic:  # cuBLAS reads it before its first use
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if runtime.compile:
            torch.compiler.reset()  # else the shapes compiled before affect this compilation
        yield


def compute_precision(wanted: str, device: torch.device) -> str:
    """The precision of matrix products: `auto` is bf16 on a GPU and fp32 on a CPU.

    A CPU without bf16 instructions computes bf16 in fp32: PyTorch would emulate every product, a hundred times slower.
    """
    if wanted == "auto":
        return "bf16" if device.type == "cuda" else "fp32"
    if wanted == "bf16" and device.type == "cpu" and not cpu_has_bf16():
        return "fp32"
    return wanted


def cpu_has_bf16() -> bool:
    """Whether this CPU has instructions that multiply bf16 numbers; False if PyTorch does not know."""
    known = torch.cpu.get_capabilities()
    return any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"))  # the last is Arm's


def default_threads() -> int:
    """CPU threads of a fresh process: OMP_NUM_THREADS, else the number of physical cores it may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, psutil.cpu_count(logical=False) or usable)


def _switches(runtime: RuntimeConfig) -> Iterator[Switch]:
    yield torch.get_default_dtype, torch.set_default_dtype, torch.float32
    yield torch.get_default_device, _set_default_device, torch.device("cpu")
    yield torch.is_grad_enabled, torch.set_grad_enabled, True
    yield torch.get_num_threads, torch.set_num_threads, runtime.threads or default_threads()
    yield _flushes_denormals, torch.set_flush_denormal, False
    yield _deterministic_mode, _set_deterministic_mode, (runtime.deterministic, False)
    for device in ("cpu", "cuda"):  # not torch.autocast, whose cache would keep casts of weights for the whole run
        yield partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device), False
    yield _matmul_precision, _set_matmul_precision, _TF32 if runtime.tf32 else _IEEE
    for module, name, value in (
        (_CUDA_MATMUL, "allow_fp16_reduced_precision_reduction", True),
        (_CUDA_MATMUL, "allow_bf16_reduced_precision_reduction", True),
        (_CUDA_MATMUL, "allow_fp16_accumulation", False),
        (_MKLDNN, "enabled", True),  # PyTorch disables it after a bf16 product on a CPU without bf16 instructions
    ):
        yield partial(getattr, module, name), partial(setattr, module, name), value


def _matmul_precision() -> tuple[str, str, str]:
    """The older setting, and the newer settings of GPU and CPU."""
    gpu, cpu = _CUDA_MATMUL.fp32_precision, _MKLDNN.matmul.fp32_precision
    try:
        return torch.get_float32_matmul_precision(), gpu, cpu
    except RuntimeError:  # raised if the newer settings disagree with the older one
        return "high" if gpu == "tf32" else "highest", gpu, cpu


def _set_matmul_precision(wanted: tuple[str, str, str]) -> None:
    torch.set_float32_matmul_precision(wanted[0])  # also sets both newer settings
    _CUDA_MATMUL.fp32_precision, _MKLDNN.matmul.fp32_precision = wanted[1:]


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # a default device slows down every call


def _flushes_denormals() -> bool:
    return torch.tensor(1e-310, dtype=torch.float64, device="cpu").mul(1.0).item() == 0.0


def _deterministic_mode() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic_mode(mode: tuple[bool, bool]) -> None:
    if mode != _deterministic_mode():  # setting it imports PyTorch's compiler, which takes a second
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
