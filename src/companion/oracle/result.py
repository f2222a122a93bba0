"""What every oracle returns."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class OracleResult:
    """TRL's answer for one batch.

    Attributes:
        loss: the scalar that TRL would back-propagate.
        gradients: its gradient for each parameter of the model, by parameter name.
        metrics: what TRL would log for this batch, by TRL's names.
    """

    loss: Float[Tensor, ""]
    gradients: dict[str, Tensor]
    metrics: dict[str, float]
