"""The sizes of every run, in one table, and where and in which precision it runs.

`cpu` is what a laptop and CI run and what the notebooks show; `gpu` is for CUDA.
"""

import functools
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch


@dataclass(frozen=True)
class Preset:
    """One row of the table, and the device and precision that were picked for it.

    Attributes:
        method: what is trained, "dpo".
        name: "cpu" or "gpu".
        size: of the model, for `companion.lm.load`.
        examples: rows of training data.
        batch_size: examples a step, over all processes together; completions, where they are
            generated in training.
        steps: optimiser steps.
        learning_rate: at the first step; it falls linearly to 0.
        beta: the coefficient of the KL regularisation with which the method learns here, if any.
        group_size: G, completions a prompt, where they are generated in training.
        device: "cpu" or "cuda".
        bf16: whether matrix products are taken in bfloat16.
    """

    method: str
    name: str
    size: str
    examples: int
    batch_size: int
    steps: int
    learning_rate: float
    beta: float
    group_size: int | None = None
    device: str = "cpu"
    bf16: bool = False

    def arguments(self, *, seed: int = 0, **overrides) -> dict:
        """Keyword arguments for the TRL config of this run; `overrides` replace or add any.

        Raises:
            ValueError: WORLD_SIZE is no number of processes that can share the batch, or G does
                not divide the completions of one generation; it lists what does.
        """
        processes = os.environ.get("WORLD_SIZE") or "1"
        known = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
        if processes not in map(str, known):
            raise ValueError(
                f"WORLD_SIZE: {processes} processes cannot share a batch of {self.batch_size}; "
                f"use one of {known}"
            )
        arguments = dict(
            output_dir=str(Path(_temporary_folder().name, self.method)),
            max_steps=self.steps,
            per_device_train_batch_size=self.batch_size // int(processes),
            learning_rate=self.learning_rate,
            seed=seed,
            use_cpu=self.device == "cpu",
            bf16=self.bf16,  # left out, TRL takes bf16 and stops on most CPUs
            gradient_checkpointing=False,  # saves memory that these models do not need
            dataloader_pin_memory=self.device == "cuda",
            logging_steps=5,
            logging_first_step=True,
            logging_nan_inf_filter=False,  # a NaN is shown, not replaced by an average
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,  # `train` has its own bar
        )
        if self.group_size is not None:
            arguments["num_generations"] = self.group_size
        arguments |= overrides
        if self.group_size is not None:
            _check_groups(arguments, int(processes))
        return arguments


PRESETS = {
    ("dpo", "cpu"): Preset(
        method="dpo",
        name="cpu",
        size="tiny",
        examples=2560,
        batch_size=64,
        steps=80,
        learning_rate=8e-4,
        beta=1.0,
    ),
    # never run on a GPU so far. On a CPU, cut to 60 steps of 64, it learns: .37 -> .78 sampled
    ("dpo", "gpu"): Preset(
        method="dpo",
        name="gpu",
        size="small",
        examples=12_800,
        batch_size=256,
        steps=200,
        learning_rate=1e-4,
        beta=1.0,
    ),
    # no KL term: its β is 0. Puts .88 of held-out pairs in their true order; 12,800 pairs and 100
    # steps of 128 take twice the time for .93
    ("reward_model", "cpu"): Preset(
        method="reward_model",
        name="cpu",
        size="tiny",
        examples=5120,
        batch_size=64,
        steps=80,
        learning_rate=2e-3,
        beta=0.0,
    ),
    # never run on a GPU so far
    ("reward_model", "gpu"): Preset(
        method="reward_model",
        name="gpu",
        size="small",
        examples=25_600,
        batch_size=256,
        steps=100,
        learning_rate=2e-4,
        beta=0.0,
    ),
    ("ipo", "cpu"): Preset(
        method="ipo",
        name="cpu",
        size="tiny",
        examples=2560,
        batch_size=64,
        steps=80,
        learning_rate=8e-4,
        beta=1.0,
    ),
    # never run on a GPU so far
    ("ipo", "gpu"): Preset(
        method="ipo",
        name="gpu",
        size="small",
        examples=12_800,
        batch_size=256,
        steps=200,
        learning_rate=1e-4,
        beta=1.0,
    ),
    ("kto", "cpu"): Preset(
        method="kto",
        name="cpu",
        size="tiny",
        examples=3072,
        batch_size=64,
        steps=48,
        learning_rate=1e-3,
        beta=0.5,
    ),
    # never run on a GPU so far
    ("kto", "gpu"): Preset(
        method="kto",
        name="gpu",
        size="small",
        examples=12_800,
        batch_size=256,
        steps=100,
        learning_rate=2e-4,
        beta=0.5,
    ),
    # sorting, against the reward model at its preset: .40 -> .70-.74 sampled, four seeds. With
    # β = 0 the score rises higher and the true reward falls, 5.8 -> 3.1-5.2
    ("ppo", "cpu"): Preset(
        method="ppo",
        name="cpu",
        size="tiny",
        examples=2560,
        batch_size=64,
        steps=40,
        learning_rate=7e-4,
        beta=0.5,
    ),
    # never run on a GPU so far
    ("ppo", "gpu"): Preset(
        method="ppo",
        name="gpu",
        size="small",
        examples=12_800,
        batch_size=256,
        steps=100,
        learning_rate=1e-4,
        beta=0.5,
    ),
    ("grpo", "cpu"): Preset(
        method="grpo",
        name="cpu",
        size="tiny",
        examples=100,
        batch_size=128,
        steps=60,
        learning_rate=5e-4,
        beta=0.04,
        group_size=8,
    ),
    # never run on a GPU so far
    ("grpo", "gpu"): Preset(
        method="grpo",
        name="gpu",
        size="small",
        examples=100,
        batch_size=512,
        steps=100,
        learning_rate=1e-4,
        beta=0.04,
        group_size=8,
    ),
    ("dr_grpo", "cpu"): Preset(
        method="dr_grpo",
        name="cpu",
        size="tiny",
        examples=100,
        batch_size=128,
        steps=60,
        learning_rate=5e-4,
        beta=0.0,
        group_size=8,
    ),
    # never run on a GPU so far
    ("dr_grpo", "gpu"): Preset(
        method="dr_grpo",
        name="gpu",
        size="small",
        examples=100,
        batch_size=512,
        steps=100,
        learning_rate=1e-4,
        beta=0.0,
        group_size=8,
    ),
    ("dapo", "cpu"): Preset(
        method="dapo",
        name="cpu",
        size="tiny",
        examples=100,
        batch_size=128,
        steps=60,
        learning_rate=5e-4,
        beta=0.0,
        group_size=8,
    ),
    # never run on a GPU so far
    ("dapo", "gpu"): Preset(
        method="dapo",
        name="gpu",
        size="small",
        examples=100,
        batch_size=512,
        steps=100,
        learning_rate=1e-4,
        beta=0.0,
        group_size=8,
    ),
    # a quarter of a generation a step, as GSPO needs several updates a generation
    # (steps_per_generation=4): 20 generations of 128. .42 -> .80 sampled
    ("gspo", "cpu"): Preset(
        method="gspo",
        name="cpu",
        size="tiny",
        examples=100,
        batch_size=32,
        steps=80,
        learning_rate=8e-4,
        beta=0.0,
        group_size=8,
    ),
    # never run on a GPU so far
    ("gspo", "gpu"): Preset(
        method="gspo",
        name="gpu",
        size="small",
        examples=100,
        batch_size=128,
        steps=400,
        learning_rate=1e-4,
        beta=0.0,
        group_size=8,
    ),
}


def preset(method: str) -> Preset:
    """Pick the row for a method: `gpu` where CUDA is there, else `cpu`.

    The environment variable COMPANION_PRESET overrides the choice. The gpu preset without CUDA
    runs on the CPU in float32; Apple's MPS is not used.

    Raises:
        ValueError: the method or the value of COMPANION_PRESET is unknown.
    """
    methods = sorted({known for known, _ in PRESETS})
    if method not in methods:
        raise ValueError(f"method: unknown method {method!r}; known: {', '.join(methods)}")
    cuda = torch.cuda.is_available()
    name = os.environ.get("COMPANION_PRESET") or ("gpu" if cuda else "cpu")
    if name not in ("cpu", "gpu"):
        raise ValueError(f"COMPANION_PRESET: unknown preset {name!r}; known: cpu, gpu")
    row = PRESETS[method, name]
    if name == "gpu" and cuda:
        # cards before Ampere only emulate bfloat16, which is slower than float32
        return replace(
            row, device="cuda", bf16=torch.cuda.is_bf16_supported(including_emulation=False)
        )
    return row


def _check_groups(arguments: dict, processes: int) -> None:
    """Whole groups in one generation. TRL's own message says what is wrong, not what is right."""
    batches = arguments.get("steps_per_generation") or arguments.get(
        "gradient_accumulation_steps", 1
    )
    rows = arguments["per_device_train_batch_size"] * processes * batches
    rows = arguments.get("generation_batch_size") or rows
    valid = [n for n in range(2, rows + 1) if rows % n == 0]
    if arguments["num_generations"] not in valid:
        raise ValueError(
            f"num_generations: {arguments['num_generations']} does not divide the {rows} "
            f"completions of one generation; use one of {valid}"
        )


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory:
    """Where trainers may write: removed when the process ends, as the cache lets it go."""
    return tempfile.TemporaryDirectory(prefix="companion-", ignore_cleanup_errors=True)
