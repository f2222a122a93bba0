"""tools/bench.py: it measures what it names. How fast things are is no test."""

import pytest
from trl import GRPOConfig

import bench


def test_configurations_are_the_pages_and_the_presets():
    configs = {name: GRPOConfig(**arguments) for name, arguments in bench.configurations().items()}
    page, preset, page_wide, preset_narrow = configs.values()
    assert (page.per_device_train_batch_size, page.num_generations) == (4, 4)
    assert page_wide.per_device_train_batch_size == preset.per_device_train_batch_size == 128
    assert preset_narrow.per_device_train_batch_size == 4
    for config in configs.values():
        assert (config.beta, config.epsilon, config.bf16) == (0.04, 0.2, False)
    assert page.gradient_checkpointing and not preset.gradient_checkpointing  # TRL's default


def test_shares_of_a_step_cover_it_and_sum_to_1():
    shares = bench.step_shares(steps=3)
    assert sum(shares.values()) == pytest.approx(1)
    assert all(share >= 0 for share in shares.values())
    for part in ("generation", "forward (policy, reference, entropy)", "backward"):
        assert shares[part] > 0.02
