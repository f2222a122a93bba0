"""The book's loss functions: pure torch, no trainer, no model, one module a method."""

from companion.losses.dpo import dpo_loss

__all__ = ["dpo_loss"]
