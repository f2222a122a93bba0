"""Presets, and the run of a trainer."""

from companion.training.presets import PRESETS, Preset, preset
from companion.training.run import quiet, train

__all__ = ["PRESETS", "Preset", "preset", "quiet", "train"]
