"""A trainer's run: quiet libraries, one live bar, the history as a table."""

import math
import warnings

import datasets
import pandas as pd
import transformers
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.utils.notebook import NotebookProgressCallback


def quiet() -> None:
    """Silence what libraries print that says nothing about the run; errors still show."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.utils.logging.set_verbosity_error()
    datasets.utils.disable_progress_bars()
    # fires whatever is passed, and prints an absolute path
    warnings.filterwarnings(
        "ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning
    )
    # TRL's default on a CPU, where it is no fault
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set", category=UserWarning)


def train(trainer: Trainer) -> pd.DataFrame:
    """Run `trainer.train()` with one progress bar.

    Returns:
        The history: one row for each logged step, one column for each logged figure (`step`,
        `loss`, `grad_norm`, ...). The trainer's figures are means over the steps since the row
        before; run times are left out.

    Raises:
        ValueError: the trainer's arguments would log no step. Nothing is trained then.
        FloatingPointError: the loss or the gradient norm became NaN or infinite. The run stops
            at the step that logs it.
    """
    quiet()
    for callback in (PrinterCallback, ProgressCallback, NotebookProgressCallback, _Watch):
        trainer.remove_callback(callback)
    watch = _Watch()
    trainer.add_callback(watch)
    try:
        trainer.train()
    finally:
        watch.close()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return pd.DataFrame(rows).drop(
        columns=["epoch", "num_tokens", "step_time"], errors="ignore"
    )


class _Watch(TrainerCallback):
    """Moves the bar, and stops a run that has no figures or whose figures are no numbers."""

    def __init__(self):
        self.bar = None

    def on_train_begin(self, args, state, control, **kwargs):
        # only now are epochs and shares of a run counted in steps
        in_time = args.logging_strategy == "steps" and state.logging_steps <= state.max_steps
        if not (in_time or args.logging_first_step or args.logging_strategy == "epoch"):
            raise ValueError(
                f"logging_steps: no row of the history would be logged in {state.max_steps} steps "
                f"with logging_steps={args.logging_steps}, "
                f"logging_strategy={args.logging_strategy.value!r} and no logging_first_step"
            )
        self.bar = tqdm(
            total=state.max_steps, desc="train", disable=not state.is_world_process_zero
        )

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        for name in ("loss", "grad_norm"):
            value = (logs or {}).get(name, 0.0)
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"{name} is {value} at step {state.global_step} of {state.max_steps}: "
                    "lower the learning rate, or look for a bad row in the data"
                )
        if logs and "loss" in logs:
            self.bar.set_postfix(loss=f"{logs['loss']:.3f}")

    def close(self):
        if self.bar is not None:
            self.bar.close()
