"""Breaks the system on purpose: this folder on PYTHONPATH, and SABOTAGE=NAME or NAME,NAME from the table at the end.

Python imports a module of this name as it starts. What a sabotage names is patched right after it is imported; all the
rest is the real system.
"""

import ctypes
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


def fsdp_hangs(fsdp, hang=time.sleep):
    """Backward of the sharded model never ends on rank 1."""
    real = fsdp.shard

    def shard(model, *args, **options):
        sharded = real(model, *args, **options)
        if os.environ.get("RANK") == "1":
            sharded.register_forward_hook(hang_in_backward)
        return sharded

    def hang_in_backward(module, inputs, output):
        output.register_hook(lambda gradient: hang(3600))

    fsdp.shard = shard


def fsdp_holds_the_gil(fsdp):
    """The same in C code: no other thread of Python runs."""
    fsdp_hangs(fsdp, ctypes.PyDLL(None).sleep)


# By name: the module, and what is done to it once it is there.
SABOTAGES = {
    "recompute_raises": ("nsa.parallel.transform", recompute_raises),
    "fsdp_hangs": ("nsa.parallel.strategy", fsdp_hangs),
    "fsdp_holds_the_gil": ("nsa.parallel.strategy", fsdp_holds_the_gil),
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
