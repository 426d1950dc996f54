"""The environment variables of an earlier system, read here and nowhere else.

A variable stands for configuration keys. A key that the file or an override sets explicitly wins, with a warning; an
`NSA_*` name that nobody knows is a warning with the closest known one.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

# Which kernels each variable switches to the reference, and at which value.
_KERNELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "NSA_USE_FA2": ("0", ("cmp", "win")),
    "NSA_USE_FA2_WIN": ("0", ("win",)),
    "NSA_USE_FA2_CMP": ("0", ("cmp",)),
    "NSA_USE_TRITON_SEL": ("0", ("sel",)),
    "NSA_SDPA_NO_FLASH": ("1", ("phi", "cmp", "select", "sel", "win", "mix")),
}
_NOTHING_TO_SWITCH = {
    "NSA_USE_SEL_PACK": "selected attention is always packed",
    "NSA_PREFILL_BATCHED": "prefill is always batched",
    "NSA_FSDP_LIMIT_ALL_GATHERS": "all-gathers are always limited",
}
_NOT_READ_YET = (
    "NSA_DISABLE_AUX_STATS",
    "NSA_DDP_SAFE_MODE",
    "NSA_DDP_STATIC_GRAPH",
    "NSA_DDP_FIND_UNUSED",
    "NSA_DDP_BUCKET_MB",
    "NSA_FSDP_SHARDING",
    "NSA_FSDP_FORWARD_PREFETCH",
    "NSA_ALLOW_SINGLE_RANK",
    "NSA_FORCE_BRANCH",
    "NSA_MEM_DUMP_EVERY",
    "NSA_TRACE_GRADS",
    "NSA_TRACE_MODULE_BWD",
    "NSA_TRACE_DDP_BUCKETS",
    "NSA_TB_DISABLE",
)
KNOWN = (*_KERNELS, *_NOTHING_TO_SWITCH, *_NOT_READ_YET)


def environment_settings(
    environment: Mapping[str, str],
) -> Iterator[tuple[str, tuple[str, ...] | None, Any, str]]:
    """(variable, key it sets or None, value, what to tell the user) for every NSA_* variable."""
    for name in sorted(n for n in environment if n.startswith("NSA_")):
        value = environment[name]
        if name in _KERNELS:
            switched_off, kernels = _KERNELS[name]
            if value not in ("0", "1"):
                yield name, None, None, f"{name}={value}: must be 0 or 1; it is not used"
            elif value == switched_off:
                for kernel in kernels:
                    yield name, ("runtime", "kernels", kernel), "reference", ""
        elif name in _NOTHING_TO_SWITCH:
            yield name, None, None, f"{name}: nothing to switch, {_NOTHING_TO_SWITCH[name]}"
        elif name in _NOT_READ_YET:
            yield name, None, None, f"{name}: this version does not read it; set the configuration key instead"
        else:
            close = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            yield name, None, None, f"{name}: unknown variable{hint}"
