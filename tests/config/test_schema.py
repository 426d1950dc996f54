"""Rules between the keys of a configuration, and how their errors read."""

from copy import deepcopy

import pytest

from nsa.config import Config, parse_config
from nsa.errors import ConfigError

MSA = {"model": {"attention": "msa"}, "msa": {"block": 64, "warmup_steps": 10}, "train": {"steps": 20}}
LOWER = "lower it, or raise train.steps"


def load(tree, *overrides):
    return parse_config(deepcopy(tree), "run.yaml", overrides)


def mistake(tree, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(tree, *overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    {
        "msa.block=96": "msa.block: must be a power of two from 16 to 256, got 96",
        "msa.block=512": "msa.block: must be at most 256, got 512",
        "msa.num_local=17": "msa.num_selected: must be at least num_local + num_init = 17, got 16",
        "msa.num_selected=65": "msa.num_selected: must be at most 64, got 65",
        "msa.index_dim=0": "msa.index_dim: must be greater than or equal to 16, got 0",
        "msa.index_dim=40": "msa.index_dim: must be a multiple of 16, got 40",
        "msa.loss_weight=0": "msa.loss_weight: must be greater than 0, got 0",
        "msa.warmup_steps=21": f"msa.warmup_steps: 21 is more than the 20 of train.steps; {LOWER}",
        "train.steps=9": f"msa.warmup_steps: 10 is more than the 9 of train.steps; {LOWER}",
    }.items(),
)
def test_a_bad_size_of_msa_names_the_override_the_key_and_the_rule(override, message):
    assert mistake(MSA, override) == f"override '{override}': {message}"


@pytest.mark.parametrize("steps", [10, 11])
def test_the_warmup_of_an_index_may_last_the_whole_run(steps):
    assert load(MSA, f"train.steps={steps}").msa.warmup_steps == 10


NO_EFFECT = "would have no effect, because no layer is of the kind msa; set model.attention=msa, or remove the section"


@pytest.mark.parametrize(
    ("tree", "overrides", "message"),
    [
        ({"msa": {"block": 64, "num_init": 1}}, (), f"run.yaml: msa: block, num_init {NO_EFFECT}"),
        ({}, ("msa.block=64",), f"override 'msa.block=64': msa: block {NO_EFFECT}"),
        (MSA, ("model.attention=dense", "msa.num_init=1"), "override 'msa.num_init=1': msa: block, num_init, warmup"),
    ],
)
def test_settings_of_msa_for_a_model_without_msa_layers_are_refused(tree, overrides, message):
    assert mistake(tree, *overrides).startswith(message)


@pytest.mark.parametrize("override", ["model.attention=dense", "model.layer_pattern=[dense, nsa]"])
def test_a_file_for_msa_trains_another_kind_with_one_override(override):
    config = load(MSA, override, "train.steps=5")
    assert "msa" not in config.model.layer_kinds()
    assert config.msa == Config().msa
    assert load(config.to_dict()) == config


@pytest.mark.parametrize("override", ["model.attention=msa", "model.layer_pattern=[dense, msa]", "model.n_layers=1"])
def test_settings_of_msa_are_kept_where_a_layer_may_use_them(override):
    tree = {**MSA, "model": {"layer_pattern": ["dense", "msa"]} if "n_layers" in override else MSA["model"]}
    assert load(tree, override).msa.block == 64
