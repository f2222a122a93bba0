"""The book's loss functions: pure torch, no trainer, no model, one module a method."""

from companion.losses.advantages import degenerate_groups, group_advantages
from companion.losses.dapo import dapo_loss, overlong_penalty
from companion.losses.dpo import dpo_loss
from companion.losses.dr_grpo import dr_grpo_loss
from companion.losses.gae import gae, whiten
from companion.losses.grpo import grpo_loss, kl_k3
from companion.losses.gspo import gspo_loss
from companion.losses.ipo import ipo_loss
from companion.losses.kto import kto_loss, kto_reference_point
from companion.losses.ppo import kl_penalized_rewards, ppo_policy_loss, ppo_value_loss
from companion.losses.reward_model import reward_model_loss

__all__ = [
    "dapo_loss",
    "degenerate_groups",
    "dpo_loss",
    "dr_grpo_loss",
    "gae",
    "group_advantages",
    "grpo_loss",
    "gspo_loss",
    "ipo_loss",
    "kl_k3",
    "kl_penalized_rewards",
    "kto_loss",
    "kto_reference_point",
    "overlong_penalty",
    "ppo_policy_loss",
    "ppo_value_loss",
    "reward_model_loss",
    "whiten",
]
