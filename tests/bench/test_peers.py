"""Public implementations are timed beside ours only where they compute the same, and say why where they are not."""

import pytest
import torch

from bench import attention, peers
from bench.shapes import SPEC, Shape
from nsa.ops import NSASpec
from nsa.ops.reference import selection

SMALL = NSASpec(cmp_block=8, cmp_stride=4, sel_block=8, num_selected=4, num_init=1, num_local=2, window=16)


def leaves(tokens=200):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, 16) for heads in (4, 2, 2))
    return [q, k, v, torch.rand(1, tokens, 4, 3)]


def ours(spec):
    return lambda q, k, v, gates: peers.reference(q, k, v, gates, spec, "reference")


def test_an_implementation_that_computes_the_same_agrees():
    assert peers.disagreement(ours(SMALL), SMALL, leaves()) is None


@pytest.mark.parametrize("change", [{"window": 17}, {"num_selected": 5}, {"num_local": 1}, {"cmp_stride": 8}])
def test_an_implementation_with_other_sizes_is_refused(change):
    spec = NSASpec(**vars(SMALL) | change)
    assert "differs from the reference" in peers.disagreement(ours(spec), SMALL, leaves())


@pytest.mark.parametrize(("every", "agrees"), [(10, True), (4, False)])
def test_some_rows_may_read_another_block_where_blocks_are_chosen(every, agrees):
    def run(q, k, v, gates):
        o = ours(SMALL)(q, k, v, gates)
        off = torch.zeros_like(o)
        off[:, ::every] = 0.2
        return o + off

    assert (peers.disagreement(run, SMALL, leaves()) is None) == agrees
    read_whole = SMALL.num_selected * SMALL.sel_block
    assert peers.disagreement(run, SMALL, leaves(read_whole)).startswith("o differs")


@pytest.mark.parametrize(("bits", "agrees"), [(9, True), (5, False)])
def test_scores_of_fewer_bits_put_every_key_off(bits, agrees, monkeypatch):
    """An implementation whose scores are in 16 bits is right, one that hardly tells blocks apart is not."""

    def run(q, k, v, gates):
        def pick(scores, *args):
            mantissa, exponent = torch.frexp(scores)
            return selection_pick(torch.ldexp((mantissa * 2**bits).round(), exponent - bits), *args)

        with monkeypatch.context() as patch:
            patch.setattr(selection, "pick_blocks", pick)
            return ours(SMALL)(q, k, v, gates)

    selection_pick = selection.pick_blocks
    assert (peers.disagreement(run, SMALL, leaves(400)) is None) == agrees


@pytest.mark.parametrize(("wrong", "num_selected"), [(0.1, 4), (0.02, 25)])
def test_a_wrong_gradient_is_refused(wrong, num_selected):
    """By 10 % where queries choose blocks, by 2 % where they read all."""
    spec = NSASpec(**vars(SMALL) | {"num_selected": num_selected})

    def run(q, k, v, gates):
        return ours(spec)(q, k.detach() + (1 - wrong) * (k - k.detach()), v, gates)

    assert peers.disagreement(run, spec, leaves(200)).startswith("dk differs")


def test_a_nan_is_refused():
    assert peers.disagreement(lambda *x: ours(SMALL)(*x) * float("nan"), SMALL, leaves()) is not None


def test_a_peer_that_cannot_be_imported_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(peers.sys.modules, "flash_nsa", None)
    missing = peers.measure("flash_nsa", Shape(1, 8192, 64, 4, 128), ["random"], 1)["missing"]
    assert "flash_nsa" in missing
    assert "--checkout flash_nsa=PATH" in missing


def test_the_table_shows_times_and_reasons():
    times = {"eager_fwd_ms": 1.0, "eager_bwd_ms": 2.0}
    found = {name: {"missing": "not there"} for name in peers.PEERS} | {"fla": {"random": times}}
    table = attention.peers_table([{"shape": "1x8k 64/4/128", "random": times, "peers": found}])
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["1x8k 64/4/128", "random", "1.00 / 2.00", "1.00 / 2.00", "not there", "not there", "not there"]


def test_a_crash_of_one_process_is_a_reason(tmp_path):
    shape = Shape(4, 8192, 12, 2, 64)
    package = tmp_path / "flash_nsa"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('no luck today')\n")
    found = peers.measure_all(shape, ["random"], 1, {"flash_nsa": tmp_path}, ["flash_nsa"])
    assert found["flash_nsa"]["refused"] == "it crashed: no luck today"


def test_fla_compresses_whole_blocks():
    assert peers.PEERS["fla"].spec == NSASpec(**vars(SPEC) | {"cmp_block": 64, "cmp_stride": 64})
