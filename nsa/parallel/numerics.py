"""What decides a run's numbers besides its inputs: PyTorch's process-wide switches, and the precision of the device.

A run sets every such switch from its configuration when it starts and restores the caller's when it ends. So its
numbers do not depend on what the process did before, and the process is not changed by the run.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import psutil
import torch

from nsa.config.schema import RuntimeConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Switch = tuple[Callable[[], Any], Callable[[Any], Any], Any]  # getter, setter, the value a run needs


@contextmanager
def numerics(runtime: RuntimeConfig) -> Iterator[None]:
    """Inside, PyTorch computes as in a fresh process with this configuration."""
    with ExitStack() as restored:
        switches = list(_switches(runtime))
        before = [get() for get, _, _ in switches]  # all of them first: some settings move others
        for (_, set_to, value), found in zip(switches, before, strict=True):
            restored.callback(set_to, found)
            set_to(value)
        if runtime.deterministic:  # cuBLAS reads it before its first use
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if runtime.compile:  # else shapes that were compiled before decide how these are
            torch.compiler.reset()
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
    """Whether this CPU multiplies bf16 numbers itself. One whose instructions are unknown counts as one without."""
    known = torch.cpu.get_capabilities()
    return any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"))  # the last: Arm


def default_threads() -> int:
    """CPU threads of a fresh process: OMP_NUM_THREADS, else the physical cores it may run on."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, psutil.cpu_count(logical=False) or usable)


def _switches(runtime: RuntimeConfig) -> Iterator[Switch]:
    """In the order they are set. They are restored in the opposite order."""
    cuda = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    yield torch.get_default_dtype, torch.set_default_dtype, torch.float32
    yield torch.get_default_device, _set_default_device, torch.device("cpu")
    yield torch.is_grad_enabled, torch.set_grad_enabled, True
    yield torch.get_num_threads, torch.set_num_threads, runtime.threads or default_threads()
    yield _flushes_denormals, torch.set_flush_denormal, False
    yield _deterministic_mode, _set_deterministic_mode, (runtime.deterministic, False)
    for device in ("cpu", "cuda"):
        yield partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device), False
    # The precision of float32 products, by operation and by the older settings, which PyTorch wants to agree.
    for operation in (cuda.matmul, mkldnn.matmul, cudnn.conv, cudnn.rnn):
        yield _attribute(operation, "fp32_precision", "ieee")
    yield _unless_mixed(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest")
    yield _unless_mixed(*_attribute(cuda.matmul, "allow_tf32", runtime.tf32))
    yield _unless_mixed(*_attribute(cudnn, "allow_tf32", runtime.tf32))
    yield _attribute(cuda.matmul, "allow_fp16_reduced_precision_reduction", True)
    yield _attribute(cuda.matmul, "allow_bf16_reduced_precision_reduction", True)
    yield _attribute(cuda.matmul, "allow_fp16_accumulation", False)
    yield _attribute(cudnn, "benchmark", False)
    yield _attribute(cudnn, "deterministic", False)
    yield _attribute(cudnn, "enabled", True)
    # PyTorch itself turns oneDNN off after the first bf16 product on a CPU without bf16 instructions.
    yield _attribute(mkldnn, "enabled", True)
    yield _attribute(mkldnn, "deterministic", False)
    yield cuda.flash_sdp_enabled, cuda.enable_flash_sdp, True
    yield cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, True
    yield cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, True
    yield cuda.math_sdp_enabled, cuda.enable_math_sdp, True


def _attribute(module: Any, name: str, value: Any) -> Switch:
    return partial(getattr, module, name), partial(setattr, module, name), value


def _unless_mixed(get: Callable[[], Any], set_to: Callable[[Any], Any], value: Any) -> Switch:
    """PyTorch refuses to read an older setting after its newer counterparts were set: then those alone are restored."""

    def read() -> Any:
        try:
            return get()
        except RuntimeError:
            return None

    return read, lambda found: None if found is None else set_to(found), value


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # one that is set costs time in every call


def _flushes_denormals() -> bool:
    return torch.tensor(1e-310, dtype=torch.float64, device="cpu").mul(1.0).item() == 0.0


def _deterministic_mode() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic_mode(mode: tuple[bool, bool]) -> None:
    if mode != _deterministic_mode():  # setting it loads PyTorch's compiler, for a second
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
