"""TRL's own trainers as an oracle: batch in, loss and gradient out. One module a trainer."""

from companion.oracle.dpo import preference_batch, trl_dpo
from companion.oracle.grpo import GRPOResult, trl_grpo
from companion.oracle.kto import trl_kto, unpaired_batch
from companion.oracle.result import OracleResult
from companion.oracle.reward_model import trl_reward_model

__all__ = [
    "GRPOResult",
    "OracleResult",
    "preference_batch",
    "trl_dpo",
    "trl_grpo",
    "trl_kto",
    "trl_reward_model",
    "unpaired_batch",
]
