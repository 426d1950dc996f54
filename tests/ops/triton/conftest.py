"""The kernels' tests run on a GPU, or through Triton's interpreter, which is switched on for a whole process.

Without a GPU, `make test` starts them by themselves with TRITON_INTERPRET=1; elsewhere they are not collected, so
that no other test runs on interpreted kernels.
"""

import os
from dataclasses import replace
from types import SimpleNamespace

import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    # More than half of the interpreter's time has no effect: it replaces the functions of triton.language at every call
    # of a device function, and computes in int64 whether int32 overflows, for assertions that are off. Here functions
    # are replaced once for the process, and overflow is not computed.
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
elif not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
