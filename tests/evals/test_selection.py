"""`nsa eval --selection`: the share of full attention in the selected blocks, as a loop over queries finds it."""

import json

import pytest
import torch
from typer.testing import CliRunner

from nsa.cli.main import app
from nsa.config.architecture import Architecture, ModelConfig, MSAConfig, NSAConfig
from nsa.errors import ConfigError
from nsa.evals.selection import selection_by_layer
from nsa.nn.attention import attention_layers
from nsa.nn.model import build_model
from nsa.nn.rope import rotary_tables
from nsa.ops.layout import token_layout
from nsa.ops.observe import observing
from nsa.record import attention_stats
from nsa.train import train
from tests.checkpoint.helpers import small

SIZES = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim_k": 16, "head_dim_v": 16}


def model_of(*kinds):
    nsa = NSAConfig(cmp_block=4, cmp_stride=2, sel_block=8, num_selected=4, num_init=1, num_local=1, window=8)
    config = Architecture(
        model=ModelConfig(n_layers=len(kinds), layer_pattern=list(kinds), **SIZES),
        nsa=nsa,
        msa=MSAConfig(block=16, num_selected=2),
    )
    model = build_model(config, 50, seed=0).double()
    for _, layer in attention_layers(model):
        layer.q.weight.data *= 20.0  # attention that is far from uniform
    return model


class Inputs:
    """What the layers of a forward pass read, and the blocks that they select."""

    failures = 0

    def __init__(self, model):
        self.blocks, self.inputs = {}, {}
        for name, layer in attention_layers(model):
            layer.register_forward_pre_hook(lambda _, args, name=name: self.enter(name, args[0]))

    def enter(self, name, x):
        self.name, self.inputs[name] = name, x

    def selected(self, indices, spec, *_):
        self.blocks[self.name] = indices, spec.sel_block


def quality_by_hand(layer, x, indices, block, borders):
    """The number of queries that choose, their mean mass, and the mean share of their heaviest blocks that are read."""
    position = token_layout(x.shape[1], borders, x.device).position
    q, keys, _ = layer.projections(x, rotary_tables(position, *layer.rotary))
    k = keys[min(1, len(keys) - 1)]  # of NSA those of the selected branch
    masses, found, queries = [], [], 0
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            at = int(position[t])
            if at < block * indices.shape[3]:
                continue
            queries += 1
            for g in range(k.shape[2]):
                chosen = [j for j in indices[b, t, g].tolist() if j >= 0]
                heads = range(g * q.shape[2] // k.shape[2], (g + 1) * q.shape[2] // k.shape[2])
                total = [0.0] * (at // block + 1)
                for head in heads:
                    weights = (k[b, t - at : t + 1, g] @ q[b, t, head] / q.shape[3] ** 0.5).softmax(0)
                    by_block = [weights[j * block : (j + 1) * block].sum().item() for j in range(len(total))]
                    masses.append(sum(by_block[j] for j in chosen))
                    total = [a + b for a, b in zip(total, by_block, strict=True)]
                heaviest = sorted(range(len(total)), key=lambda j: -total[j])[: indices.shape[3]]
                found.append(len(set(heaviest) & set(chosen)) / len(heaviest))
    return queries, sum(masses) / len(masses), sum(found) / len(found)


@pytest.mark.parametrize(
    ("borders", "batch"), [(None, 2), ([0, 30, 50, 130], 1)], ids=["two sequences", "packed documents"]
)
def test_the_selection_of_every_layer_equals_a_loop_over_queries(borders, batch, monkeypatch):
    monkeypatch.setattr(attention_stats, "EVALUATED", 1000)  # all queries
    monkeypatch.setattr(attention_stats, "MAX_ELEMENTS", 7 * batch * 4 * 130)  # 7 queries of a sequence at once
    model = model_of("nsa", "msa", "dense")
    tokens = torch.randint(0, 50, (batch, 130), generator=torch.Generator().manual_seed(0))
    documents = None if borders is None else torch.tensor(borders, dtype=torch.int32)
    with torch.no_grad(), selection_by_layer(model) as rows:
        model.hidden(tokens, documents)
    seen = Inputs(model)
    with torch.no_grad(), observing(seen):
        model.hidden(tokens, documents)
    layers = dict(attention_layers(model))
    assert [row["layer"] for row in rows] == list(layers)
    for row in rows[:2]:
        name = row["layer"]
        with torch.no_grad():
            wanted = quality_by_hand(layers[name], seen.inputs[name], *seen.blocks[name], documents)
        assert row["queries"] == wanted[0]
        assert (row["mass"], row["heaviest"]) == pytest.approx(wanted[1:], rel=1e-9)
        assert 0.3 < row["mass"] < 0.95
        assert 0.3 < row["heaviest"] < 0.95
    assert rows[2] == {"layer": "blocks.2.attention", "queries": 0, "mass": 1.0, "heaviest": 1.0}


def test_a_sample_of_queries_is_spread_over_those_that_choose(monkeypatch):
    model, tokens = model_of("msa"), torch.arange(160)[None] % 50
    measured = []
    for most in (1000, 60):
        monkeypatch.setattr(attention_stats, "EVALUATED", most)
        with torch.no_grad(), selection_by_layer(model) as rows:
            model.hidden(tokens)
        measured.append(rows[0])
    assert [row["queries"] for row in measured] == [160 - 32] * 2
    assert measured[0]["mass"] != measured[1]["mass"]
    assert measured[0]["mass"] == pytest.approx(measured[1]["mass"], abs=0.05)


def test_layers_that_read_everything_hold_all_of_the_attention():
    tokens = torch.arange(32)[None]
    with torch.no_grad(), selection_by_layer(model_of("dense", "msa", "nsa", "window")) as rows:
        pass
    with torch.no_grad(), selection_by_layer(model := model_of("dense", "msa", "nsa")) as short:
        model.hidden(tokens)
    assert [row["layer"] for row in rows] == [f"blocks.{n}.attention" for n in range(3)], "a window is no selection"
    assert (
        short
        == rows
        == [{"layer": f"blocks.{n}.attention", "queries": 0, "mass": 1.0, "heaviest": 1.0} for n in range(3)]
    )
    with pytest.raises(ConfigError, match="--selection: no layer of the model selects blocks"):
        selection_by_layer(model_of("window")).__enter__()


def test_the_command_shows_the_selection_in_tables_json_and_figures(tmp_path):
    train(small("train.steps=1", "model.n_layers=2", "model.layer_pattern=[nsa,dense]"), tmp_path / "run")
    arguments = ["eval", str(tmp_path / "run"), "--selection", "--lengths", "64,128", "--samples", "1"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "full attention in the selected blocks, in %" in result.output
    found = json.loads((tmp_path / "run" / "eval.json").read_text())["selection"]
    assert [row["length"] for row in found] == [64, 128]
    for row in found:
        nsa, dense = row["layers"]
        assert 0 < nsa["mass"] < 1
        assert nsa["queries"] > 0
        assert dense == {"layer": "blocks.1.attention", "queries": 0, "mass": 1.0, "heaviest": 1.0}
    page = (tmp_path / "run" / "eval.html").read_text()
    for name in ("mass", "heaviest"):
        figure = page[page.index(f'id="plot-selection-{name}"') :].split("</figure>")[0]
        assert figure.count('class="cell') == 4
        assert "layer 1" in figure
