"""The environment variables of an earlier system. No other module reads them.

A variable sets configuration keys. If the file or an override sets the key too, that value wins and a warning says so.
An unknown `NSA_*` variable gives a warning with the closest known name.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from nsa.config.schema import KernelsConfig

_IGNORED = {
    "NSA_USE_SEL_PACK": "selected attention is always packed",
    "NSA_PREFILL_BATCHED": "prefill is always batched",
    "NSA_FSDP_LIMIT_ALL_GATHERS": "all-gathers are always limited",
}
_SWITCH: dict[str, Any] = {"0": False, "1": True}
_SHARDING: dict[str, Any] = {"full": "full", "full_shard": "full", "grad_op": "grad_op", "shard_grad_op": "grad_op"}
_BRANCH: dict[str, Any] = {"cmp": "cmp", "sel": "sel", "win": "win"}
_ALL_KERNELS = " ".join(f"runtime.kernels.{name}" for name in KernelsConfig.model_fields)
_KERNELS_OFF: dict[str, Any] = {"0": "reference", "1": None}
# The keys that each variable sets, and its values (None: any integer). A value that maps to None sets nothing.
_KEYS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "NSA_USE_FA2": ("runtime.kernels.cmp runtime.kernels.win", _KERNELS_OFF),
    "NSA_USE_FA2_WIN": ("runtime.kernels.win", _KERNELS_OFF),
    "NSA_USE_FA2_CMP": ("runtime.kernels.cmp", _KERNELS_OFF),
    "NSA_USE_TRITON_SEL": ("runtime.kernels.sel", _KERNELS_OFF),
    "NSA_SDPA_NO_FLASH": (_ALL_KERNELS, {"0": None, "1": "reference"}),
    "NSA_DDP_SAFE_MODE": ("parallel.ddp.safe_mode", _SWITCH),
    "NSA_DDP_STATIC_GRAPH": ("parallel.ddp.static_graph", _SWITCH),
    "NSA_DDP_FIND_UNUSED": ("parallel.ddp.find_unused", _SWITCH),
    "NSA_DDP_BUCKET_MB": ("parallel.ddp.bucket_mb", None),
    "NSA_FSDP_SHARDING": ("parallel.fsdp.sharding", _SHARDING),
    "NSA_FSDP_FORWARD_PREFETCH": ("parallel.fsdp.forward_prefetch", _SWITCH),
    "NSA_ALLOW_SINGLE_RANK": ("parallel.allow_single_rank", _SWITCH),
    "NSA_FORCE_BRANCH": ("nsa.force_branch", _BRANCH),
    "NSA_MEM_DUMP_EVERY": ("telemetry.mem_dump_every", None),
    "NSA_DISABLE_AUX_STATS": ("telemetry.attention", {"0": True, "1": False}),
    "NSA_TRACE_GRADS": ("telemetry.trace_grads", _SWITCH),
    "NSA_TRACE_MODULE_BWD": ("telemetry.trace_modules", _SWITCH),
    "NSA_TRACE_DDP_BUCKETS": ("telemetry.trace_buckets", _SWITCH),
    "NSA_TB_DISABLE": ("telemetry.tensorboard", {"0": True, "1": False}),
}
_FOR_TESTS = ("NSA_FAULTS",)  # nsa.faults
KNOWN = (*_KEYS, *_IGNORED, *_FOR_TESTS)


def environment_settings(environment: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...] | None, Any, str]]:
    """Yields (variable, key that it sets or None, value, warning or "") for every NSA_* variable."""
    for name in sorted(n for n in environment if n.startswith("NSA_")):
        value = environment[name]
        if name in _KEYS:
            keys, values = _KEYS[name]
            allowed = "an integer" if values is None else f"one of {', '.join(values)}"
            is_number = values is None and value.isascii() and value.isdigit()
            if not is_number and value.lower() not in (values or ()):
                yield name, None, None, f"{name}={value}: must be {allowed}; ignored"
            elif (found := values[value.lower()] if values else int(value)) is not None:
                for key in keys.split():
                    yield name, tuple(key.split(".")), found, ""
        elif name in _FOR_TESTS:
            yield name, None, None, f"{name}={value}: fault injection is on, which is for tests"
        elif name in _IGNORED:
            yield name, None, None, f"{name}: has no effect, {_IGNORED[name]}"
        else:
            close = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield name, None, None, f"{name}: unknown variable{hint}"
