"""torch.compile of every block, under every strategy and with checkpointing, gives the run that is not compiled."""

import pytest

from tests.distributed.test_same_numbers import SHORT, assert_same, recompute, strategy, train_all, tree

COMPILED = {"runtime": {"compile": True}}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "size"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_compiled_run_has_the_same_numbers(tmp_path, kind, size):
    plain = {"name": "plain", "config": tree(SHORT, strategy(kind))}
    compiled = {"name": "compiled", "config": tree(SHORT, strategy(kind), COMPILED)}
    both = [
        {"name": granularity, "config": tree(SHORT, strategy(kind), COMPILED, recompute(granularity))}
        for granularity in ("selective", "block")
    ]
    train_all(tmp_path, size, [plain, compiled, *both])
    for name in ("compiled", "selective", "block"):
        assert_same(tmp_path / name, tmp_path / "plain", loss=1e-5, norm=1e-4)
