"""The environment variables of an earlier system; no other module reads them.

A variable sets configuration keys. A key that the file or an override sets explicitly wins, with a warning. An unknown
`NSA_*` name gives a warning with the closest known one.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

# The value at which each variable switches kernels to the reference, and which kernels.
_KERNELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "NSA_USE_FA2": ("0", ("cmp", "win")),
    "NSA_USE_FA2_WIN": ("0", ("win",)),
    "NSA_USE_FA2_CMP": ("0", ("cmp",)),
    "NSA_USE_TRITON_SEL": ("0", ("sel",)),
    "NSA_SDPA_NO_FLASH": ("1", ("phi", "cmp", "select", "sel", "win", "mix")),
}
_IGNORED = {
    "NSA_USE_SEL_PACK": "selected attention is always packed",
    "NSA_PREFILL_BATCHED": "prefill is always batched",
    "NSA_FSDP_LIMIT_ALL_GATHERS": "all-gathers are always limited",
}
_SWITCH: dict[str, Any] = {"0": False, "1": True}
_SHARDING: dict[str, Any] = {"full": "full", "full_shard": "full", "grad_op": "grad_op", "shard_grad_op": "grad_op"}
_BRANCH: dict[str, Any] = {"cmp": "cmp", "sel": "sel", "win": "win"}
# The key that each variable sets, and its values; None for an integer.
_KEYS: dict[str, tuple[tuple[str, ...], dict[str, Any] | None]] = {
    "NSA_DDP_SAFE_MODE": (("parallel", "ddp", "safe_mode"), _SWITCH),
    "NSA_DDP_STATIC_GRAPH": (("parallel", "ddp", "static_graph"), _SWITCH),
    "NSA_DDP_FIND_UNUSED": (("parallel", "ddp", "find_unused"), _SWITCH),
    "NSA_DDP_BUCKET_MB": (("parallel", "ddp", "bucket_mb"), None),
    "NSA_FSDP_SHARDING": (("parallel", "fsdp", "sharding"), _SHARDING),
    "NSA_FSDP_FORWARD_PREFETCH": (("parallel", "fsdp", "forward_prefetch"), _SWITCH),
    "NSA_ALLOW_SINGLE_RANK": (("parallel", "allow_single_rank"), _SWITCH),
    "NSA_FORCE_BRANCH": (("nsa", "force_branch"), _BRANCH),
    "NSA_MEM_DUMP_EVERY": (("telemetry", "mem_dump_every"), None),
    "NSA_DISABLE_AUX_STATS": (("telemetry", "attention"), {"0": True, "1": False}),
    "NSA_TRACE_GRADS": (("telemetry", "trace_grads"), _SWITCH),
    "NSA_TRACE_MODULE_BWD": (("telemetry", "trace_modules"), _SWITCH),
    "NSA_TRACE_DDP_BUCKETS": (("telemetry", "trace_buckets"), _SWITCH),
    "NSA_TB_DISABLE": (("telemetry", "tensorboard"), {"0": True, "1": False}),
}
_FOR_TESTS = ("NSA_FAULTS",)  # nsa.faults
KNOWN = (*_KERNELS, *_IGNORED, *_KEYS, *_FOR_TESTS)


def environment_settings(
    environment: Mapping[str, str],
) -> Iterator[tuple[str, tuple[str, ...] | None, Any, str]]:
    """(variable, key it sets or None, value, warning or "") for every NSA_* variable."""
    for name in sorted(n for n in environment if n.startswith("NSA_")):
        value = environment[name]
        if name in _KERNELS:
            switched_off, kernels = _KERNELS[name]
            if value not in ("0", "1"):
                yield name, None, None, f"{name}={value}: must be 0 or 1; ignored"
            elif value == switched_off:
                for kernel in kernels:
                    yield name, ("runtime", "kernels", kernel), "reference", ""
        elif name in _KEYS:
            key, values = _KEYS[name]
            if values is None and value.isascii() and value.isdigit():
                yield name, key, int(value), ""
            elif values is not None and value.lower() in values:
                yield name, key, values[value.lower()], ""
            else:
                allowed = "an integer" if values is None else f"one of {', '.join(values)}"
                yield name, None, None, f"{name}={value}: must be {allowed}; ignored"
        elif name in _FOR_TESTS:
            yield name, None, None, f"{name}={value}: fault injection is on, which is for tests"
        elif name in _IGNORED:
            yield name, None, None, f"{name}: nothing to switch, {_IGNORED[name]}"
        else:
            close = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield name, None, None, f"{name}: unknown variable{hint}"
