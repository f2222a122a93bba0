"""TRL's DPOTrainer: every ``loss_type`` of the installed release."""

import copy
import tempfile
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from companion.oracle.result import ARGUMENTS, OracleResult, ask
from companion.oracle.rows import TokenIds, check_rows


def preference_batch(
    prompts: TokenIds, chosen: TokenIds, rejected: TokenIds, *, pad_token_id: int
) -> dict[str, Tensor]:
    """Collate preference pairs with TRL's own collator.

    Args:
        prompts, chosen, rejected: B lists of token ids each; completions with their EOS.
        pad_token_id: what fills the right-hand side of shorter rows.

    Returns:
        ``input_ids``, ``attention_mask`` and ``completion_mask``, each (2B, time): the chosen
        rows first, then the rejected ones.

    Raises:
        ValueError: no row, different numbers of rows, an empty prompt or completion, or a row
            that is not made of token ids.
    """
    check_rows(prompts=prompts, chosen=chosen, rejected=rejected)
    examples = [
        {"prompt_ids": list(x), "chosen_ids": list(y_w), "rejected_ids": list(y_l)}
        for x, y_w, y_l in zip(prompts, chosen, rejected, strict=True)
    ]
    return DataCollatorForPreference(pad_token_id=pad_token_id)(examples)


def trl_dpo(
    model: PreTrainedModel,
    ref_model: PreTrainedModel,
    batch: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    **config: Any,
) -> OracleResult:
    """Loss and parameter gradients that DPOTrainer computes for a batch.

    The trainer is TRL's, unchanged; it works on copies, since some releases patch the model that
    they are given. Runs on the CPU in the models' dtype.

    Args:
        model: π_θ.
        ref_model: π_ref, another object.
        batch: from `preference_batch`.
        tokenizer: only to construct the trainer; the batch is tokenized already.
        config: keywords of ``trl.DPOConfig``: ``loss_type``, ``beta``, ``label_smoothing``, ...;
            not ``output_dir`` and those in `ARGUMENTS`, which are fixed.

    Source: TRL 1.12.0 ``DPOTrainer.compute_loss`` (trl/trainer/dpo_trainer.py:1755).
    """
    placeholder = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with tempfile.TemporaryDirectory() as folder:
        trainer = DPOTrainer(
            model=copy.deepcopy(model),
            ref_model=copy.deepcopy(ref_model),
            args=DPOConfig(output_dir=folder, **ARGUMENTS, **config),
            processing_class=tokenizer,
            train_dataset=placeholder,
        )
        return ask(trainer, batch)
