"""The preset table, and what is picked on which machine."""

import pytest
import torch
from trl import DPOConfig, GRPOConfig

from companion import training
from companion.lm.model import SIZES
from companion.training import PRESETS


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("COMPANION_PRESET", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def with_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_table():
    for (method, name), row in PRESETS.items():
        assert (row.method, row.name) == (method, name)
        assert (method, {"cpu": "gpu", "gpu": "cpu"}[name]) in PRESETS
        assert row.size in SIZES
        assert row.examples * (row.group_size or 1) >= row.batch_size
        assert row.group_size is None or row.batch_size % row.group_size == 0


def test_cpu_without_cuda(without_cuda):
    row = training.preset("dpo")
    assert (row.name, row.device, row.bf16) == ("cpu", "cpu", False)


def test_gpu_with_cuda(with_cuda):
    row = training.preset("dpo")
    assert (row.name, row.device, row.bf16) == ("gpu", "cuda", True)
    arguments = row.arguments()
    assert arguments["bf16"] and not arguments["use_cpu"]


def test_old_cards_that_emulate_bfloat16_run_in_float32(with_cuda, monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    row = training.preset("dpo")
    assert (row.device, row.bf16) == ("cuda", False)


def test_cpu_preset_stays_on_the_cpu(with_cuda, monkeypatch):
    monkeypatch.setenv("COMPANION_PRESET", "cpu")
    row = training.preset("dpo")
    assert (row.name, row.device, row.bf16) == ("cpu", "cpu", False)
    assert row.arguments()["use_cpu"]


def test_gpu_preset_without_cuda(without_cuda, monkeypatch):
    monkeypatch.setenv("COMPANION_PRESET", "gpu")
    row = training.preset("dpo")
    assert (row.name, row.device, row.bf16) == ("gpu", "cpu", False)
    DPOConfig(**row.arguments())


def test_unknown_values(monkeypatch):
    with pytest.raises(ValueError, match="method: unknown method 'sarsa'; known: dapo, dpo"):
        training.preset("sarsa")
    monkeypatch.setenv("COMPANION_PRESET", "tpu")
    with pytest.raises(ValueError, match="COMPANION_PRESET: unknown preset 'tpu'; known: cpu, gpu"):
        training.preset("dpo")


def test_an_empty_override_is_none(without_cuda, monkeypatch):
    monkeypatch.setenv("COMPANION_PRESET", "")
    assert training.preset("dpo").name == "cpu"


def test_arguments_make_a_config(without_cuda):
    row = training.preset("dpo")
    config = DPOConfig(loss_type="sigmoid", beta=row.beta, **row.arguments(seed=3))
    assert config.max_steps == row.steps
    assert config.train_batch_size == row.batch_size
    assert config.learning_rate == row.learning_rate
    assert config.seed == 3
    assert not config.bf16 and not config.gradient_checkpointing
    assert row.arguments()["report_to"] == "none"  # the default differs between versions
    assert config.report_to == []
    assert config.save_strategy == "no"
    assert config.device.type == "cpu"


def test_overrides_replace_and_add(without_cuda):
    arguments = training.preset("dpo").arguments(max_steps=7, warmup_steps=2)
    assert arguments["max_steps"] == 7 and arguments["warmup_steps"] == 2


def test_the_batch_is_global(without_cuda, monkeypatch):
    row = training.preset("dpo")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert row.arguments()["per_device_train_batch_size"] == row.batch_size // 2
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="WORLD_SIZE: 3 processes cannot share a batch of 64"):
        row.arguments()


def test_an_empty_world_size_is_one_process(without_cuda, monkeypatch):
    row = training.preset("dpo")
    monkeypatch.setenv("WORLD_SIZE", "")
    assert row.arguments()["per_device_train_batch_size"] == row.batch_size


@pytest.mark.parametrize("world_size", ["0", "-1", "1.0", "two", "128"])
def test_a_world_size_that_cannot_share_the_batch_is_named(without_cuda, monkeypatch, world_size):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(ValueError, match=f"WORLD_SIZE: {world_size} processes .* use one of"):
        training.preset("dpo").arguments()


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_group_methods_make_a_config(without_cuda, method):
    row = training.preset(method)
    config = GRPOConfig(**row.arguments(beta=row.beta))
    assert config.num_generations == row.group_size == 8
    assert config.generation_batch_size == row.batch_size


def test_a_group_size_that_does_not_divide_is_refused_with_those_that_do(
    without_cuda, monkeypatch
):
    row = training.preset("grpo")
    for wrong in (3, 1, 0, 256):
        with pytest.raises(
            ValueError,
            match=f"num_generations: {wrong} does not divide the 128 completions of one "
            r"generation; use one of \[2, 4, 8, 16, 32, 64, 128\]",
        ):
            row.arguments(num_generations=wrong)
    # several micro-batches, or several processes, share one generation
    assert row.arguments(per_device_train_batch_size=2, num_generations=6,
                         gradient_accumulation_steps=3)
    assert row.arguments(per_device_train_batch_size=3, num_generations=6, steps_per_generation=4)
    assert row.arguments(num_generations=6, generation_batch_size=12)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert row.arguments(num_generations=128)["per_device_train_batch_size"] == 64
