"""What every oracle returns, and how it is read off a trainer."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers import PrinterCallback, Trainer

# How every oracle's trainer runs: on the CPU, in the model's own dtype, silently.
ARGUMENTS = dict(
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    report_to="none",
    disable_tqdm=True,
)


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


def ask(trainer: Trainer, batch: dict[str, Any]) -> OracleResult:
    """The loss of one batch by the trainer's own ``compute_loss``, and its gradients."""
    trainer.remove_callback(PrinterCallback)
    model = trainer.model.train()
    loss = trainer.compute_loss(model, dict(batch))  # some releases add keys to what they get
    loss.backward()
    trainer.log({})
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return OracleResult(loss.detach(), gradients, trainer.state.log_history[-1])
