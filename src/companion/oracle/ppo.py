"""TRL's experimental PPOTrainer, where the installed release has it (1.8.0 to 1.12.0)."""

import copy
import importlib.util
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback

from companion.oracle.result import ARGUMENTS
from companion.oracle.rows import TokenIds, check_rows

HAS_PPO = importlib.util.find_spec("trl.experimental.ppo") is not None


@dataclass(frozen=True)
class PPOUpdate:
    """One micro-batch of one epoch: what TRL puts into its two losses, and what comes out.

    Attributes:
        logps, values: log π_θ and V_θ of this update, data here.
        old_logps, old_values, advantages, returns: of the sampling; the advantages are whitened.
        mask: real tokens, over which the policy's loss is taken.
        value_mask: those and one slot more, over which the value's loss is taken.
        policy_loss, value_loss: the two terms; TRL descends policy_loss + vf_coef·value_loss.
        logps_gradient, values_gradient: of that sum.
    """

    logps: Float[Tensor, "batch time"]
    values: Float[Tensor, "batch time"]
    old_logps: Float[Tensor, "batch time"]
    old_values: Float[Tensor, "batch time"]
    advantages: Float[Tensor, "batch time"]
    returns: Float[Tensor, "batch time"]
    mask: Bool[Tensor, "batch time"]
    value_mask: Bool[Tensor, "batch time"]
    policy_loss: Float[Tensor, ""]
    value_loss: Float[Tensor, ""]
    logps_gradient: Float[Tensor, "batch time"]
    values_gradient: Float[Tensor, "batch time"]


@dataclass(frozen=True)
class PPOResult:
    """One sampling of TRL's PPOTrainer and the updates that follow from it.

    Attributes:
        scores: r_φ(x, y) of each response, after a penalty for a missing EOS.
        logps, ref_logps: of the sampled tokens, at TRL's temperature; 1 under the mask. ``logps``
            are float32 whatever the model's dtype, since they come from ``generate``.
        kl_rewards: the KL part of the rewards, −β·(estimate of the KL) a token.
        raw_rewards: with the score, where TRL puts it: one slot after the last token.
        rewards: whitened, if TRL was told to; else the same.
        values, returns, advantages: the advantages are whitened, returns − values are not.
        mask, value_mask: as in `PPOUpdate`.
        updates: in order; epochs × micro-batches.
        metrics: what TRL logged.
    """

    scores: Float[Tensor, " batch"]
    logps: Float[Tensor, "batch time"]
    ref_logps: Float[Tensor, "batch time"]
    kl_rewards: Float[Tensor, "batch time"]
    raw_rewards: Float[Tensor, "batch time"]
    rewards: Float[Tensor, "batch time"]
    values: Float[Tensor, "batch time"]
    returns: Float[Tensor, "batch time"]
    advantages: Float[Tensor, "batch time"]
    mask: Bool[Tensor, "batch time"]
    value_mask: Bool[Tensor, "batch time"]
    updates: tuple[PPOUpdate, ...]
    metrics: dict[str, float | int]


def trl_ppo(
    model: PreTrainedModel,
    ref_model: PreTrainedModel,
    reward_model: PreTrainedModel,
    value_model: PreTrainedModel,
    prompts: TokenIds,
    tokenizer: PreTrainedTokenizerBase,
    **config: Any,
) -> PPOResult:
    """Let PPOTrainer sample once, and update for as many epochs as it is told to.

    The trainer is TRL's, unchanged, on copies of the models. ``accelerator.backward`` is watched:
    each time it is called, the local variables of ``PPOTrainer.train`` are read.

    Args:
        model: π_θ, which also samples.
        ref_model: π_ref.
        reward_model: r_φ, a sequence classifier with one output.
        value_model: V_θ, likewise.
        prompts: B lists of token ids; B is the batch.
        tokenizer: names the pad and EOS ids.
        config: keywords of ``trl.experimental.ppo.PPOConfig``: ``num_ppo_epochs``, ``kl_coef``,
            ``response_length``, ...; not ``output_dir``, ``total_episodes``, ``batch_size`` and
            those in `ARGUMENTS`, which are fixed.

    Raises:
        RuntimeError: the installed TRL has no PPOTrainer.
        ValueError: no prompt, or a prompt that is empty or not made of token ids.

    Source: TRL 1.12.0 ``PPOTrainer.train`` (trl/experimental/ppo/ppo_trainer.py:604).
    """
    if not HAS_PPO:
        raise RuntimeError("the installed TRL has no PPOTrainer: 1.12.0 is the last that has")
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    check_rows(prompts=prompts)
    settings = dict(
        per_device_train_batch_size=len(prompts), num_sample_generations=0, stop_token="eos"
    )
    seed = config.get("seed", 0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = PPOTrainer(
            args=PPOConfig(
                output_dir=folder,
                total_episodes=len(prompts),
                **ARGUMENTS,
                **(settings | config),
            ),
            processing_class=tokenizer,
            model=copy.deepcopy(model),
            ref_model=copy.deepcopy(ref_model),
            reward_model=copy.deepcopy(reward_model),
            value_model=copy.deepcopy(value_model),
            train_dataset=Dataset.from_list([{"input_ids": list(row)} for row in prompts]),
            eval_dataset=None,
        )
        trainer.remove_callback(PrinterCallback)
        updates, sampled = [], {}
        backward = trainer.accelerator.backward

        def watched(loss, **kwargs):
            frame = sys._getframe(1)
            while frame.f_code.co_name != "train":  # wrappers may stand between
                frame = frame.f_back
            local = frame.f_locals
            local["new_logprobs"].retain_grad()
            local["vpred"].retain_grad()
            backward(loss, **kwargs)
            updates.append(_update(local))
            sampled.update(local)

        trainer.accelerator.backward = watched
        np.random.seed(seed)  # shuffles the mini-batches
        default = torch.get_default_dtype()
        torch.set_default_dtype(model.dtype)  # of the quotient n / (n − 1) in TRL's variance
        try:
            trainer.train()
        finally:
            torch.set_default_dtype(default)
    raw_rewards = sampled["non_score_reward"].clone()
    raw_rewards[sampled["actual_start"], sampled["actual_end"]] += sampled["scores"]
    return PPOResult(
        scores=sampled["scores"],
        logps=sampled["logprobs"],
        ref_logps=sampled["ref_logprobs"],
        kl_rewards=sampled["non_score_reward"],
        raw_rewards=raw_rewards,
        rewards=sampled["rewards"],
        values=sampled["values"],
        returns=sampled["returns"],
        advantages=sampled["advantages"],
        mask=~sampled["padding_mask"],
        value_mask=~sampled["padding_mask_p1"],
        updates=tuple(updates),
        metrics=trainer.state.log_history[0],
    )


def _update(local: dict[str, Any]) -> PPOUpdate:
    rows = local["micro_batch_inds"]
    return PPOUpdate(
        logps=local["new_logprobs"].detach(),
        values=local["vpred"].detach(),
        old_logps=local["mb_logprobs"],
        old_values=local["mb_values"],
        advantages=local["mb_advantage"],
        returns=local["mb_return"],
        mask=~local["padding_mask"][rows],
        value_mask=~local["padding_mask_p1"][rows],
        policy_loss=local["pg_loss"].detach(),
        value_loss=local["vf_loss"].detach(),
        logps_gradient=local["new_logprobs"].grad,
        values_gradient=local["vpred"].grad,
    )
