"""The reward model of a task: what 4.4.2 trains, and 4.4.3 trains again to learn from."""

import pandas as pd
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from trl import RewardConfig, RewardTrainer

from companion.lm import checkpoint, load
from companion.training.presets import preset
from companion.training.run import train


def new_reward_model(task_name: str, *, seed: int = 0) -> PreTrainedModel:
    """The warmed-up model of a task with one output in place of the vocabulary's, untrained.

    Args:
        task_name: as for `companion.lm.checkpoint`.
        seed: of the new layer's weights.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForSequenceClassification.from_pretrained(
            checkpoint(task_name, preset("reward_model").size), num_labels=1, dtype=torch.float32
        )


def train_reward_model(
    task_name: str, pairs: Dataset, *, seed: int = 0, **overrides
) -> tuple[PreTrainedModel, pd.DataFrame]:
    """Train a task's reward model by TRL's RewardTrainer, (4.8), at the preset's sizes.

    Args:
        task_name: as for `companion.lm.checkpoint`.
        pairs: columns `prompt`, `chosen` and `rejected`, as `companion.tasks.preferences` makes.
        seed: of the new layer's weights and of the order of the pairs.
        overrides: arguments of ``trl.RewardConfig`` in place of the preset's.

    Returns:
        The model and the history, as `train` returns it.
    """
    trainer = RewardTrainer(
        model=new_reward_model(task_name, seed=seed),
        processing_class=load(task_name)[1],
        args=RewardConfig(**preset("reward_model").arguments(seed=seed, **overrides)),
        train_dataset=pairs,
    )
    history = train(trainer)
    return trainer.model, history
