"""The kernels' tests run on a GPU, or through Triton's interpreter, which is switched on for a whole process.

Without a GPU, `make test` starts them by themselves with TRITON_INTERPRET=1; elsewhere they are not collected, so
that no other test runs on interpreted kernels.
"""

import functools
import math
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
import torch


def quicken():
    """Most of the interpreter's time has no effect: it replaces the functions of triton.language at every call of a
    device function, and computes in int64 whether int32 overflows, for assertions that are off. Here functions are
    replaced once for the process, and overflow is not computed. What the interpreter works out for every operator of
    the types and shapes of its operands is kept."""
    import triton.language as tl
    from triton.language import semantic
    from triton.runtime import interpreter

    def patch_attr(owner, name, member, _builder, scope):
        # Without the function around each builtin, which only looks whether `_semantic` is given.
        function = getattr(member, "__wrapped__", member)

        def call(*args, _semantic=None, **kwargs):
            return function(*args, _semantic=interpreter.interpreter_semantic, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch_attr
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
            self.of_tensor = of_tensor(key[1:])
            types[key] = vars(self).copy()
        vars(self).update(types[key])

    def make_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensor if type.is_block() else scalar

    @functools.cache
    def of_tensor(shape):
        return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])

    scalar = of_tensor(())

    def numpy_dtype(kind):
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = look_up(kind.scalar)
        return dtypes[name]

    tl.block_type.__init__, tl.tensor.__init__ = make_block_type, make_tensor
    interpreter._get_np_dtype = numpy_dtype

    unwrap, is_equal = tl.core._unwrap_if_constexpr, tl.dtype.__eq__
    operators = semantic.TritonSemantic
    broadcast, cast, constant = operators.broadcast_impl_value, operators.cast, operators.scalar_constant
    constants, common = {}, {}

    def quick_unwrap(value):
        if isinstance(value, tl.constexpr):
            return value.value
        return unwrap(value) if isinstance(value, (list, tuple, tl.tuple)) else value

    def quick_broadcast(self, lhs, rhs):
        if lhs.shape is rhs.shape:  # of_tensor gives equal shapes as one object
            return lhs, rhs
        pair = id(lhs.shape), id(rhs.shape)
        if pair not in common:  # also where the shapes do not fit, which is an error
            results = broadcast(self, lhs, rhs)
            common[pair] = results[0].shape, [size.value for size in results[0].shape]
            return results
        shape, sizes = common[pair]
        return tuple(x if x.shape is shape else spread(x, sizes) for x in (lhs, rhs))

    def spread(x, sizes):
        data = numpy.broadcast_to(x.handle.data, sizes)
        return tl.tensor(interpreter.TensorHandle(data, x.handle.dtype.scalar), tl.block_type(x.dtype, sizes))

    def quick_cast(self, value, kind, *args):
        return value if value.dtype is kind else cast(self, value, kind, *args)

    def quick_constant(self, value, dtype):
        key = type(value), value, dtype.name
        if key not in constants:
            constants[key] = constant(self, value, dtype)
        return constants[key]

    tl.core._unwrap_if_constexpr = quick_unwrap
    tl.dtype.__eq__ = lambda self, other: self is other or is_equal(self, other)
    operators.broadcast_impl_value, operators.cast = quick_broadcast, quick_cast
    operators.scalar_constant = quick_constant
    operators.computation_type_impl = functools.cache(operators.computation_type_impl)


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
