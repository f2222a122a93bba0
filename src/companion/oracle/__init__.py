"""TRL's own trainers as an oracle: batch in, loss and gradient out. One module a trainer."""

from companion.oracle.dpo import preference_batch, trl_dpo
from companion.oracle.grpo import GRPOResult, trl_grpo
from companion.oracle.kto import trl_kto, unpaired_batch
from companion.oracle.ppo import HAS_PPO, PPOResult, trl_ppo
from companion.oracle.result import OracleResult
from companion.oracle.reward_model import trl_reward_model

__all__ = [
    "HAS_PPO",
    "GRPOResult",
    "OracleResult",
    "PPOResult",
    "preference_batch",
    "trl_dpo",
    "trl_grpo",
    "trl_kto",
    "trl_ppo",
    "trl_reward_model",
    "unpaired_batch",
]
