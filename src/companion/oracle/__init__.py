"""TRL's own trainers as an oracle: batch in, loss and gradient out. One module a trainer."""

from companion.oracle.dpo import preference_batch, trl_dpo
from companion.oracle.result import OracleResult

__all__ = ["OracleResult", "preference_batch", "trl_dpo"]
