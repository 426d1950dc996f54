"""`python -m bench.long` on a CPU with a tiny model: every check and every figure, and what a wrong kernel gets."""

import json
from functools import partial

import pytest
import torch

from bench import long
from bench.shapes import Shape

TINY = [
    *("model.dim=32", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=1", "model.mlp_dim=48"),
    *("model.head_dim_k=16", "model.head_dim_v=16", "runtime.precision=fp32"),
]


def run(out, *arguments):
    tiny = ["--device", "cpu", "--lengths", "1536", "--quick", "--allow-dirty", "--out", str(out), "--override", *TINY]
    return long.main([*arguments, *tiny])


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    """Blocks become graphs as on a GPU; inductor would compile C++ for a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.fixture
def _attention_in_float32(monkeypatch):
    """As on a CPU without bf16 instructions."""
    original = long.check_attention
    monkeypatch.setattr(long, "check_attention", lambda shape, device: original(shape, device, dtype=torch.float32))


@pytest.mark.long
@pytest.mark.usefixtures("_attention_in_float32")
def test_it_checks_measures_and_writes_results(tmp_path, capsys):
    assert run(tmp_path / "long.json", "--ranks", "0", "--checkpointing", "none,block") == 0
    found = json.loads((tmp_path / "long.json").read_text())
    assert set(found["checks"]) == {"chunks 1536", "attention 1x1k 2/1/16"}
    assert max(found["checks"]["attention 1x1k 2/1/16"].values()) < 1e-5
    assert [result["gradient_checkpointing"] for result in found["results"]] == ["none", "block"]
    for result in found["results"]:
        assert result["seq_len"] == 1536
        assert result["toks_per_s"] > 0
        assert result["predicted_gib"] > 0
    assert "One GPU" in capsys.readouterr().out


@pytest.mark.usefixtures("_attention_in_float32")
def test_wrong_results_are_not_timed(tmp_path, monkeypatch, capsys):
    original = long.selected_attention
    monkeypatch.setattr(long, "selected_attention", lambda *args: original(*args) * 1.02)
    assert run(tmp_path / "long.json", "--ranks", "0") == 1
    found = json.loads((tmp_path / "long.json").read_text())
    assert (found["results"], found["rank_shares"]) == ([], [])
    assert "attention sel" in capsys.readouterr().err


def test_a_length_that_does_not_fit_is_recorded_without_a_time(tmp_path, monkeypatch):
    def exhausted(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(long, "run_checks", lambda *_: {})
    monkeypatch.setattr(long, "timed_steps", exhausted)
    assert run(tmp_path / "long.json", "--ranks", "0") == 0
    results = json.loads((tmp_path / "long.json").read_text())["results"]
    assert [result["toks_per_s"] for result in results] == [None, None, None]


def test_the_checks_of_a_million_tokens_hold_no_whole_pass_of_that_length(monkeypatch):
    """A pass that is not cut into chunks needs 135 GiB there; attention is checked at some rows of the full length."""
    lengths = {"chunks": [], "attention": []}
    monkeypatch.setattr(long, "check_chunks", lambda length, _: lengths["chunks"].append(length) or {})
    monkeypatch.setattr(long, "check_attention", lambda shape, _: lengths["attention"].append(shape.tokens) or {})
    options = long.argparse.Namespace(config="configs/m7c_125m_1m.yaml", device="cpu", override=[], quick=True)
    found = long.run_checks(options, [1 << 20])
    assert lengths == {"chunks": [1 << 16], "attention": [1 << 20]}
    assert list(found) == ["chunks 65536", "attention 1x1024k 12/2/64"]


def test_lengths_that_cannot_fit_are_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(long, "run_checks", lambda *_: {})
    monkeypatch.setattr(long, "memory_gib", lambda _: 0.0)
    monkeypatch.setattr(long, "_measure", lambda *_: pytest.fail("tried"))
    assert run(tmp_path / "long.json", "--ranks", "0", "--checkpointing", "none") == 0
    assert [r["step_s"] for r in json.loads((tmp_path / "long.json").read_text())["results"]] == [None]


def test_one_rank_computes_its_share_and_counts_its_bytes(tmp_path):
    options = long.argparse.Namespace(config="configs/m7c_125m_1m.yaml", device="cpu", override=TINY, steps=1, ranks=2)
    share = long.rank_share(1536, options)
    assert share["sent_bytes_forward"] > 1536 // 2 * 16 * 2 * 2
    assert share["step_s"] > 0


def test_blocks_that_differ_are_counted():
    shape = Shape(1, 1536, 2, 1, 16)
    x = long.make_inputs(shape, correlated=True, dtype=torch.float32, device="cpu")
    k, v = (part.detach() for part in x.compressed())
    _, lse = long.compressed_attention(x.q, k, v, long.SPEC)
    indices = long.select_blocks(x.q, k, lse, long.SPEC)[:, 1500]
    assert long.row_by_hand(x, k, v, 1500, indices)[1] == 0.0
    unchosen = next(j for j in range(24) if j not in indices[0, 0].tolist())
    indices[0, 0, 5] = unchosen
    assert long.row_by_hand(x, k, v, 1500, indices)[1] == pytest.approx(1 / 16)
