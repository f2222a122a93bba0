"""TRL's RewardTrainer."""

import copy
import tempfile
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import RewardConfig, RewardTrainer

from companion.oracle.result import ARGUMENTS, OracleResult, ask


def trl_reward_model(
    model: PreTrainedModel,
    batch: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    **config: Any,
) -> OracleResult:
    """Loss and parameter gradients that RewardTrainer computes for a batch.

    The trainer is TRL's, unchanged; it works on a copy of the model.

    Args:
        model: r_φ, a sequence classifier with one output.
        batch: ``input_ids`` and ``attention_mask``, each (2B, time), the chosen rows first, as
            `preference_batch` makes them (its completion mask is left out).
        tokenizer: only to construct the trainer; the batch is tokenized already.
        config: keywords of ``trl.RewardConfig``; not ``output_dir`` and those in `ARGUMENTS`,
            which are fixed.

    Source: TRL 1.12.0 ``RewardTrainer.compute_loss`` (trl/trainer/reward_trainer.py:743).
    """
    placeholder = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with tempfile.TemporaryDirectory() as folder:
        trainer = RewardTrainer(
            model=copy.deepcopy(model),
            args=RewardConfig(output_dir=folder, **ARGUMENTS, **config),
            processing_class=tokenizer,
            train_dataset=placeholder,
        )
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return ask(trainer, inputs)
