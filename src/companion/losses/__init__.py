"""The book's loss functions: pure torch, no trainer, no model, one module a method."""

from companion.losses.dpo import dpo_loss
from companion.losses.ipo import ipo_loss
from companion.losses.kto import kto_loss, kto_reference_point
from companion.losses.reward_model import reward_model_loss

__all__ = ["dpo_loss", "ipo_loss", "kto_loss", "kto_reference_point", "reward_model_loss"]
