"""TRL's KTOTrainer."""

import copy
import tempfile
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import KTOConfig, KTOTrainer
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from companion.oracle.result import ARGUMENTS, OracleResult, ask
from companion.oracle.rows import TokenIds, check_rows


def unpaired_batch(
    prompts: TokenIds, completions: TokenIds, desirable: Sequence[bool], *, pad_token_id: int
) -> dict[str, Tensor]:
    """Collate unpaired responses with TRL's own collator, mismatched pairs included.

    The mismatched response of a prompt is that of the row before it, as KTOTrainer has it inside
    one batch: rotated by one, the last to the first.

    Args:
        prompts, completions: B lists of token ids each; completions with their EOS.
        desirable: B labels.
        pad_token_id: what fills the right-hand side of shorter rows.

    Returns:
        ``input_ids``, ``attention_mask``, ``completion_mask``, each (B, time), the same of the
        mismatched pairs with the prefix ``KL_``, and ``label`` (B,).

    Raises:
        ValueError: different numbers of rows, fewer than two, an empty prompt or completion, or
            a row that is not made of token ids.
    """
    check_rows(prompts=prompts, completions=completions)
    if len(desirable) != len(prompts):
        raise ValueError(
            f"desirable must have {len(prompts)} rows like prompts, got {len(desirable)}"
        )
    if len(prompts) < 2:
        raise ValueError("prompts needs at least 2 rows: a single one has no mismatch")
    mismatched = [completions[-1], *completions[:-1]]
    examples = [
        {
            "prompt_ids": list(prompt),
            "completion_ids": list(completion),
            "KL_completion_ids": list(other),
            "label": bool(label),
        }
        for prompt, completion, other, label in zip(
            prompts, completions, mismatched, desirable, strict=True
        )
    ]
    return DataCollatorForUnpairedPreference(pad_token_id=pad_token_id)(examples)


def trl_kto(
    model: PreTrainedModel,
    ref_model: PreTrainedModel,
    batch: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    **config: Any,
) -> OracleResult:
    """Loss and parameter gradients that KTOTrainer computes for a batch.

    The trainer is TRL's, unchanged; it works on copies of the models.

    Args:
        model: π_θ.
        ref_model: π_ref, another object.
        batch: from `unpaired_batch`.
        tokenizer: only to construct the trainer; the batch is tokenized already.
        config: keywords of ``trl.KTOConfig``; not ``output_dir``, ``per_device_train_batch_size``
            and those in `ARGUMENTS`, which are fixed.

    Source: TRL 1.12.0 ``KTOTrainer._compute_loss`` (trl/trainer/kto_trainer.py:1492).
    """
    placeholder = Dataset.from_list(
        [
            {"prompt": "a", "completion": "b", "label": True},
            {"prompt": "b", "completion": "c", "label": False},
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = KTOTrainer(
            model=copy.deepcopy(model),
            ref_model=copy.deepcopy(ref_model),
            args=KTOConfig(
                output_dir=folder, per_device_train_batch_size=2, **ARGUMENTS, **config
            ),
            processing_class=tokenizer,
            train_dataset=placeholder,
        )
        return ask(trainer, batch)
