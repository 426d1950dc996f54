"""`nsa memory`: what it prints, and which cards it knows."""

import json
import os
import subprocess
import sys
from unittest.mock import patch

import pytest

from nsa.checks.memory_estimate import CARDS, GIB, GRANULARITIES, Card, Planner, estimate, find_card
from nsa.cli.main import app
from nsa.errors import ConfigError
from nsa.nn.cache import KVCache
from nsa.nn.model import build_model
from tests.checks.memory import BASE, ROOT, SMALL, config_of, traced_once


@pytest.fixture(scope="module", autouse=True)
def _each_pass_is_traced_once():
    with patch("nsa.checks.memory_estimate.trace", traced_once):
        yield


def test_cards_by_name_and_by_size():
    assert find_card("A100-80GB").gib == CARDS["a100-80gb"]
    assert find_card("40").gib == find_card("40 GiB".replace(" ", "")).gib == 40.0
    for text in ("81920", "a101", "0", "-3", "nan", "inf", ""):
        with pytest.raises(ConfigError, match="--card"):
            find_card(text)


COMMAND = ["memory", str(ROOT / "configs" / f"{BASE}.yaml"), "model.n_layers=2", "--nproc", "2"]


@pytest.fixture
def nsa_memory(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("nsa.checks.memory_estimate.present_card", lambda: None)

    def run(*arguments):
        app([*COMMAND, *arguments], standalone_mode=False)
        return capsys.readouterr().out

    return run


def test_the_command_prints_three_tables_in_80_columns(nsa_memory):
    printed = nsa_memory()
    assert max(map(len, printed.replace(str(ROOT), "").splitlines())) <= 80
    for words in ("optimizer state", "DDP buckets", "peak", "none (configured)", "a100-40gb", "Reserved: 1 GiB"):
        assert words in printed


@pytest.mark.long
def test_the_command_runs_as_a_process_without_a_gpu_and_prints_no_warning():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "nsa", *COMMAND]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert "a100-40gb" in done.stdout


def test_the_command_advises_what_to_change_when_it_does_not_fit(nsa_memory):
    needed = json.loads(nsa_memory("--json", "--card", "h200"))["estimate"]["needed_gib"]
    printed = nsa_memory("--card", f"{needed - 0.01:.3f}")
    assert "TOO LARGE" in printed
    assert "DOES NOT FIT" in printed
    assert "runtime.gradient_checkpointing=block" in printed
    assert "Cards are compared with" not in printed


def test_the_command_shows_the_range_with_compile_and_plans_with_its_upper_end(nsa_memory):
    found = json.loads(nsa_memory("--json", "--card", "h200", "--override", "runtime.compile=true"))
    low, high = found["estimate"]["compiled_gib"]
    assert low < high == found["estimate"]["planned_gib"] < found["estimate"]["peak_gib"]
    assert found["compiled"]["branch"] is None
    printed = nsa_memory("--card", "h200", "--override", "runtime.compile=true")
    assert f"{low:.2f} to {high:.2f}" in printed
    assert "not measured" in printed
    assert "Cards are compared with the upper end" in printed


def test_the_command_prints_json_and_rejects_bad_input(nsa_memory):
    found = json.loads(nsa_memory("--json", "--card", "h200"))
    assert found["schema"] == 1
    assert set(found["checkpointing"]) == set(GRANULARITIES)
    assert found["estimate"]["peak_gib"] == found["checkpointing"]["none"]
    assert found["estimate"]["peak_gib"] * GIB == pytest.approx(
        sum(found["estimate"][part] for part in estimate(config_of(BASE)).parts), rel=1e-6
    )
    assert found["cards"][0]["fits"]
    assert found["cards"][0]["left_gib"] > 100
    with pytest.raises(ConfigError, match="--card") as refused:
        nsa_memory("--card", "a101")
    assert refused.value.exit_code == 2


def test_the_cache_is_predicted_to_the_byte(nsa_memory):
    """A real cache of three sequences is larger than one of two by what was predicted for a sequence."""
    small = [*SMALL, "model.n_layers=3", "model.layer_pattern=[nsa,dense,window]", "runtime.precision=fp32"]
    config = config_of(BASE, *small)
    predicted = Planner(config).estimate_cache(1000)
    model = build_model(config, 256, seed=0)
    two, three = (KVCache(model, sequences=n, max_length=1000).memory() for n in (2, 3))
    assert predicted.parts == {part: three[part] - two[part] for part in two}
    assert predicted.weights == sum(p.nbytes for p in model.parameters())
    assert predicted.most_sequences(Card("none", 0.5)) == 0
    printed = nsa_memory("--cache", "32768", "--card", "24gb")
    found = json.loads(nsa_memory("--cache", "32768", "--card", "24gb", "--json"))["cache"]
    assert found["parts"]["sel"] == 2 * 32768 * 2 * (64 + 64) * 2  # layers, tokens, heads, channels, bytes
    assert f"one sequence {sum(found['parts'].values()) / 2**20:.2f}" in " ".join(printed.split())
    assert f"24gb: {found['most_sequences']['24gb']} sequences of this length fit" in printed
    for refused in ("0", "2147483648", "1" + 20 * "0"):
        with pytest.raises(ConfigError, match="--cache: must be from 1 to 2147483647 tokens, got"):
            nsa_memory("--cache", refused)
    longest = Planner(config).estimate_cache(2**31 - 1).parts
    assert longest["sel"] == predicted.parts["sel"] // 1024 * 2**31
    assert longest["win"] == predicted.parts["win"]
