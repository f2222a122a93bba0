"""Presets, the run of a trainer, and the trainers that TRL does not have."""

from companion.training.dynamic_sampling import DynamicSamplingGRPOTrainer
from companion.training.presets import PRESETS, Preset, preset
from companion.training.reward_model import new_reward_model, train_reward_model
from companion.training.run import quiet, train
from companion.training.tabular import tabular_ppo

__all__ = [
    "PRESETS",
    "DynamicSamplingGRPOTrainer",
    "Preset",
    "new_reward_model",
    "preset",
    "quiet",
    "tabular_ppo",
    "train",
    "train_reward_model",
]
