"""bench.train without a GPU: what it trains, and how it counts."""

from types import SimpleNamespace

import pytest
import torch

from bench import train
from nsa.config import load_config
from nsa.nn.attention import attention_layers
from nsa.nn.flops import flops_per_token
from nsa.nn.model import build_model
from tests.bench.conftest import TINY


def measure(attention, name, *override, passes=1):
    options = {"config": name, "pass_tokens": 128, "passes": passes, "checkpointing": "block", "steps": 1}
    return train.measure(attention, 64, False, False, False, SimpleNamespace(**options, override=override))


@pytest.mark.parametrize("name", ["m7c_125m", "m7c_125m_hybrid", "m7c_125m_muon", "msa_1b", "convert_msa"])
def test_a_shipped_configuration_is_measured_with_its_layers_and_its_vocabulary(monkeypatch, name):
    monkeypatch.setattr(train, "_measure", lambda config, *_: config.model)
    measured, dense = measure("configured", name), measure("dense", name)
    assert measured.layer_kinds() == load_config(name).model.layer_kinds()
    assert set(dense.layer_kinds()) == {"dense"}
    assert measured.vocab_size == dense.vocab_size == (50_257 if name == "m7c_125m_muon" else 256)


@pytest.mark.parametrize(("kind", "label", "passes"), [("configured", "nsa+dense", 2), ("msa", "msa", 1)])
def test_the_operations_of_a_step_are_those_of_its_tokens(monkeypatch, kind, label, passes):
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    settings = [text for text in TINY.split() if not text.startswith("msa.")]
    found = measure(kind, "m7c_125m_hybrid", *settings, "model.n_layers=4", passes=passes)
    assert (found["attention"], found["batch_size"]) == (label, 2)
    config = load_config("m7c_125m_hybrid", [*([] if kind == "configured" else [f"model.attention={kind}"]), *settings])
    model = build_model(config.model_copy(update={"model": config.model.model_copy(update={"n_layers": 4})}), 256, 0)
    for _, layer in attention_layers(model):
        layer.prepare(64)  # freezes the index, which no query of such sequences reads
    operations = passes * 2 * 64 * flops_per_token(model, 64).sparse
    assert found["tflops"] * found["step_ms"] * 1e9 == pytest.approx(operations)
    assert found["toks_per_s"] * found["step_ms"] / 1e3 == pytest.approx(passes * 2 * 64)
