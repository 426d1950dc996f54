"""Loss and MLP in chunks of tokens, as in passes of a million: the run that computes them at once, to rounding."""

import pytest

from tests.distributed.test_same_numbers import SHORT, assert_same, recompute, strategy, train_all, tree


@pytest.mark.timeout(300)
def test_long_passes_train_the_same_model_under_every_strategy(tmp_path):
    """20 tokens at a time for the loss and 48 for the MLP; of the runs on two ranks, one has a teacher."""
    taught = {"train": {"teacher": str(tmp_path / "plain")}}
    train_all(
        tmp_path, 1, [{"name": "plain", "config": tree(SHORT)}, {"name": "taught", "config": tree(SHORT, taught)}]
    )
    jobs = {
        "ddp": tree(SHORT, strategy("ddp", find_unused=True), recompute("selective")),
        "fsdp": tree(SHORT, strategy("fsdp"), recompute("block"), {"train": {"micro_batch": 1}}),
        "fsdp-taught": tree(SHORT, strategy("fsdp"), recompute("branch"), taught),
    }
    train_all(tmp_path, 2, [{"name": name, "config": config, "long": True} for name, config in jobs.items()])
    for name in jobs:
        assert_same(tmp_path / name, tmp_path / ("taught" if "taught" in name else "plain"), loss=1e-5, norm=1e-4)
