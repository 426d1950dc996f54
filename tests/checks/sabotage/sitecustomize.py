"""Breaks the system on purpose: this folder on PYTHONPATH, and SABOTAGE=NAME or NAME,NAME from the table at the end.

Python imports a module of this name as it starts. What a sabotage names is patched right after it is imported; all the
rest is the real system.
"""

import importlib.util
import os
import sys
import time


def recompute_raises(recompute):
    """The second forward pass of a checkpointed module, the one in backward, raises."""
    real = recompute.checkpoint

    def checkpoint(function, *args, **options):
        calls = 0

        def twice(*inputs, **named):
            nonlocal calls
            calls += 1
            if calls > 1:
                raise RuntimeError("sabotage: the recomputed forward pass")
            return function(*inputs, **named)

        return real(twice, *args, **options)

    recompute.checkpoint = checkpoint


def win_raises(library):
    def window_attention(*args, **options):
        raise RuntimeError("sabotage: window attention")

    library.window_attention = window_attention


def fsdp_hangs(fsdp):
    """Backward of the sharded model never ends on rank 1."""
    real = fsdp.shard

    def shard(model, *args, **options):
        sharded = real(model, *args, **options)
        if os.environ.get("RANK") == "1":
            sharded.register_forward_hook(_hang_in_backward)
        return sharded

    fsdp.shard = shard


def sel_gradient_wrong(selected):
    """The Triton kernels' gradient of selected attention's keys is a twentieth too large."""
    real = selected.backward

    def backward(*args, **options):
        dq, dk, dv = real(*args, **options)
        return dq, dk * 1.05, dv

    selected.backward = backward


def reference_gradient_wrong(attention):
    """The reference's gradient of selected attention's keys is a twentieth too large."""
    sel_gradient_wrong(attention.selected)


def _hang_in_backward(module, inputs, output):
    output.register_hook(lambda gradient: time.sleep(3600))


# By name: the module, and what is done to it once it is there.
SABOTAGES = {
    "recompute_raises": ("nsa.parallel.recompute", recompute_raises),
    "win_raises": ("nsa.ops.library", win_raises),
    "fsdp_hangs": ("nsa.parallel.strategy", fsdp_hangs),
    "sel_gradient_wrong": ("nsa.ops.triton.selected", sel_gradient_wrong),
    "reference_gradient_wrong": ("nsa.ops.reference.attention", reference_gradient_wrong),
}


class Saboteur:
    """Finds the modules to patch through the other finders."""

    def __init__(self, names):
        self.patches = {}
        for name in names:
            module, patch = SABOTAGES[name]
            self.patches.setdefault(module, []).append(patch)

    def find_spec(self, name, path=None, target=None):
        patches = self.patches.pop(name, None)  # only once: the search below calls this finder again
        if patches is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for patch in patches:
                patch(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("SABOTAGE"):
    sys.meta_path.insert(0, Saboteur(os.environ["SABOTAGE"].split(",")))
