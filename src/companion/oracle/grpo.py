"""TRL's GRPOTrainer: GRPO, Dr. GRPO, DAPO, GSPO and whatever else the installed release has."""

import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer

from companion.oracle.result import ARGUMENTS, OracleResult, ask
from companion.oracle.rows import TokenIds, check_rows


@dataclass(frozen=True)
class GRPOResult(OracleResult):
    """TRL's answer for one batch of completions.

    Attributes:
        advantages: Â_i, as TRL makes them from the rewards.
        batch: ``input_ids``, ``attention_mask`` and ``completion_mask``, each (B, time): the
            prompts padded on the left, the completions on the right. Tokens that TRL leaves out
            of the loss are 0 in the last.
    """

    advantages: Float[Tensor, " batch"]
    batch: dict[str, Tensor]


def trl_grpo(
    model: PreTrainedModel,
    old_model: PreTrainedModel,
    ref_model: PreTrainedModel,
    prompts: TokenIds,
    completions: TokenIds,
    rewards: Sequence[float | int | None],
    tokenizer: PreTrainedTokenizerBase,
    **config: Any,
) -> GRPOResult:
    """Loss and parameter gradients that GRPOTrainer computes for completions of our choice.

    The trainer is TRL's, unchanged, and takes its own way from the rewards to the advantages, the
    old log-probs and the loss; only what it would sample and how it would be rewarded are given.
    It works on copies of the models, on the CPU, in the dtype of ``ref_model``.

    Args:
        model: π_θ.
        old_model: π_θold, which is taken to have written the completions. TRL works with its
            log-probs when a generation serves several updates (``num_iterations=2``); with one
            it takes the ratio for 1 whatever this model is.
        ref_model: π_ref; used when ``beta`` is not 0.
        prompts: B lists of token ids, the rows of a group one after the other.
        completions: B lists of token ids; one that lacks the EOS was cut.
        rewards: B rewards; None is a completion that was not scored.
        tokenizer: names the pad and EOS ids; texts do not matter here.
        config: keywords of ``trl.GRPOConfig``: ``num_generations``, ``loss_type``, ``beta``,
            ``epsilon``, ...; not ``output_dir``, ``per_device_train_batch_size``,
            ``model_init_kwargs`` and those in `ARGUMENTS`, which are fixed.

    Raises:
        ValueError: no row, columns of unequal length, an empty prompt or completion, a row that is
            not made of token ids, or whatever GRPOConfig refuses.

    Source: TRL 1.12.0 ``GRPOTrainer._generate_and_score_completions`` and ``_compute_loss``
        (trl/trainer/grpo_trainer.py:2412, 3109).
    """
    check_rows(prompts=prompts, completions=completions)
    if len(rewards) != len(prompts):
        raise ValueError(f"rewards must have {len(prompts)} rows like prompts, got {len(rewards)}")

    def rollout(prompts_of_trl, trainer):
        ids = dict(prompt_ids=prompts, completion_ids=completions)
        return {name: [list(row) for row in rows] for name, rows in ids.items()} | dict(
            logprobs=None
        )

    def reward(prompts, **columns):
        return list(rewards)

    rows = [{"prompt": "a"} for _ in prompts]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*'rollout_func', which is an experimental", UserWarning)
        # TRL loads its reference from the folder that the model came from.
        ref_model.save_pretrained(folder)
        trainer = GRPOTrainer(
            model=folder,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=len(prompts),
                model_init_kwargs=dict(dtype=ref_model.dtype, local_files_only=True),
                **ARGUMENTS,
                **config,
            ),
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows),
            rollout_func=rollout,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1  # Trainer.train() would set it
        trainer.model.load_state_dict(old_model.state_dict())
        inputs = trainer._generate_and_score_completions(rows)
        trainer.model.load_state_dict(model.state_dict())
        result = ask(trainer, inputs)
    advantages = inputs["advantages"]
    loss_mask = inputs["completion_mask"]
    no_prompt = torch.zeros_like(inputs["prompt_mask"])
    batch = dict(
        input_ids=torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
        attention_mask=torch.cat([inputs["prompt_mask"], loss_mask], 1),
        completion_mask=torch.cat([no_prompt, loss_mask], 1),
    )
    return GRPOResult(**vars(result), advantages=advantages, batch=batch)
