"""The kernels' tests run on a GPU, or through Triton's interpreter, which is switched on for a whole process.

Without a GPU, `make test` starts them by themselves with TRITON_INTERPRET=1; elsewhere they are not collected, so
that no other test runs on interpreted kernels.
"""

import functools
import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch


def quicken():
    """Most of the interpreter's time has no effect: it replaces the functions of triton.language at every call of a
    device function, and computes in int64 whether int32 overflows, for assertions that are off. Here functions are
    replaced once for the process, and overflow is not computed. What a type or a shape says of a tensor, which the
    interpreter works out for the result of every operator, is kept."""
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    make_type, look_up, types, dtypes = tl.block_type.__init__, interpreter._get_np_dtype, {}, {}

    def make_block_type(self, element_ty, shape):
        key = element_ty.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        vars(self).update(types[key])

    def make_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = constants(type.shape if type.is_block() else ())

    @functools.cache
    def constants(shape):
        return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])

    def numpy_dtype(kind):
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = look_up(kind.scalar)
        return dtypes[name]

    tl.block_type.__init__, tl.tensor.__init__ = make_block_type, make_tensor
    interpreter._get_np_dtype = numpy_dtype


if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()
elif not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def poisoned(monkeypatch):
    """Fresh memory holds NaN, or -7 where it holds integers: an element that nobody writes shows."""

    def poison(make):
        def filled(*args, **kwargs):
            x = make(*args, **kwargs)
            if x.device.type == "meta" or x.dtype == torch.bool:
                return x
            return x.fill_(torch.nan if x.is_floating_point() else -7)

        return filled

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
