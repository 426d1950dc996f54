"""vLLM's class reads the configuration of `nsa export --for vllm` and fills every parameter from its weights.

The class is built on a CPU, without its attention kernels, which have no parameters. Nothing is computed.
"""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.hf.test_stock import make_run

pytest.importorskip("transformers")
from nsa.hf.exporter import export_model

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: pip install --no-deps vllm, and what it imports"),
]
NO_IMPORT = 77
THEIRS = """
import json, sys, tempfile
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from unittest.mock import MagicMock, patch
import torch
from safetensors.torch import load_file
try:
    import torchvision
except (ImportError, RuntimeError):  # vLLM imports it for images only
    for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
        name = "torchvision" + name
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None), __path__=[], __version__="0")
try:
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.models.minimax_m3.nvidia import model as theirs
    from vllm.transformers_utils.config import get_config
except ImportError as error:
    print(error)
    sys.exit(NO_IMPORT)

described = get_config("vllm", trust_remote_code=False)
assert described.architectures == ["MiniMaxM3SparseForCausalLM"], described.architectures
config = VllmConfig(device_config=DeviceConfig(device="cpu"))
text = described.get_text_config()
kinds = {"dtype": torch.float32, "head_dtype": torch.float32, "is_moe": False}
config.model_config = SimpleNamespace(hf_text_config=text, **kinds)
with set_current_vllm_config(config), patch.object(theirs, "Attention"):
    store = "file://" + tempfile.mktemp()
    init_distributed_environment(1, 0, store, 0, backend="gloo")
    initialize_model_parallel(1, 1)
    model = theirs.MiniMaxM3SparseForCausalLM(vllm_config=config)


def load(tensors):
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    unused = [name for name, tensor in tensors.items() if not model.load_weights([(name, tensor)])]
    return {"unused": unused, "not filled": [name for name, p in model.named_parameters() if p.isnan().any()]}


tensors = load_file("vllm/model.safetensors")
results = {"vllm": load(tensors), "hf": load(load_file("hf/model.safetensors"))}
name = "model.layers.1.self_attn.index_q_proj.weight"
try:
    load({name: tensors[name][:-1]})
    results["wrong shape"] = "accepted"
except (AssertionError, RuntimeError):
    results["wrong shape"] = "refused"
with open("results.json", "w") as file:
    json.dump(results, file)
"""


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_of_vllm_is_filled_and_every_tensor_is_used(tmp_path, tied):
    sizes = {"dim": 256, "n_heads": 4, "head_dim_k": 128, "head_dim_v": 128, "rotary_dim": 64, "tied_head": tied}
    run = make_run(tmp_path / "run", sizes | {"layer_pattern": ["dense", "msa"]}, {"block": 128})
    for form in ("vllm", "hf"):
        export_model(run, tmp_path / form, form=form)
    code = THEIRS.replace("NO_IMPORT", str(NO_IMPORT))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    if done.returncode == NO_IMPORT:
        pytest.skip(f"vLLM cannot be imported here: {done.stdout.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["vllm"] == {"unused": [], "not filled": []}
    assert found["wrong shape"] == "refused"
    # The form for transformers has other names of the index, so the comparison can fail.
    assert [name for name in found["hf"]["unused"] if ".indexer." in name]
    assert found["hf"]["not filled"]
