"""Pickles that would run code in whoever loads them without care."""

import builtins
import functools
import os
import pickle
import subprocess

import torch
from torch.distributed.checkpoint import metadata as dcp

DCP = b"ctorch.distributed.checkpoint.metadata\n"


class Calls:
    """Pickled, it asks whoever loads it to call `function`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def malicious_pickles(proof):
    """What would each create the file `proof`, or change the process, if it were simply unpickled."""
    touch = f"touch {proof}"
    wrapped = dcp.Metadata({"model/weight": Calls(os.system, touch)}, storage_data={})
    return {
        "os.system": pickle.dumps(Calls(os.system, touch)),
        "os.system inside the metadata": pickle.dumps(wrapped),
        "in the oldest protocol": pickle.dumps(Calls(os.system, touch), protocol=0),
        "subprocess": pickle.dumps(Calls(subprocess.check_output, ["touch", str(proof)])),
        "eval": pickle.dumps(Calls(eval, f"open({str(proof)!r}, 'w')")),
        "exec": pickle.dumps(Calls(exec, f"open({str(proof)!r}, 'w')")),
        "open": pickle.dumps(Calls(open, str(proof), "w")),
        "getattr": pickle.dumps(Calls(getattr, dcp.Metadata, "__init__")),
        "getattr of an enumeration": pickle.dumps(Calls(getattr, dcp._MEM_FORMAT_ENCODING, "__init__")),
        "getattr of something built": pickle.dumps(Calls(getattr, Calls(os.system, touch), "real")),
        "getattr with a default": pickle.dumps(
            Calls(getattr, dcp._MEM_FORMAT_ENCODING, "x", dcp._MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT)
        ),
        "import": pickle.dumps(Calls(builtins.__import__, "no_such_module")),
        "functools.partial": pickle.dumps(functools.partial(os.system, touch)),
        "torch.load": pickle.dumps(Calls(torch.load, str(proof))),
        "torch.save": pickle.dumps(Calls(torch.save, {}, str(proof))),
        "through a dotted name": b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x02os\x93.",
        "through an attribute of a listed type": (
            b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x1dMetadata.__init__.__globals__\x93."
        ),
        "an unlisted class of a listed module": DCP + b"StatefulT\n.",
        "an instance of the old kind": b"(S'" + touch.encode() + b"'\nios\nsystem\n.",
        "an extension code": b"\x82\x01.",
        "a persistent id": b"Pwhatever\n.",
        "no pickle": b"#!/bin/sh\ntouch " + str(proof).encode(),
        "nothing": b"",
        "cut": pickle.dumps(Calls(os.system, touch))[:-3],
        "endless nesting": b"(" * 100_000,
        "another object": pickle.dumps({"state_dict_metadata": {}}),
    }
