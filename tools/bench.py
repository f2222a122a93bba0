"""Speed: GRPO on the tiny model, what a step is made of, and what our losses cost.

    python tools/bench.py            measure and print (two to three minutes)
    python tools/bench.py --write    and put the tables into RUNTIMES.md

All figures are CPU seconds of one thread, medians over steps or repetitions; a preset is the cpu
one whatever the machine.
"""

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager

os.environ.update(
    COMPANION_PRESET="cpu", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1"
)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from tqdm.auto import tqdm  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from companion.lm import checkpoint, load  # noqa: E402
from companion.losses import dapo_loss, dr_grpo_loss, grpo_loss, gspo_loss  # noqa: E402
from companion.rewards import exact_match  # noqa: E402
from companion.tasks import PRIME_SUMS, problems  # noqa: E402
from companion.training import preset, quiet, train  # noqa: E402
from runtimes import machine, update_section  # noqa: E402

WARM_UP = 5  # steps left out

# The support page's switches of 5.3.1, and bf16=False, without which it stops on a CPU.
PAGE = dict(
    loss_type="grpo", importance_sampling_level="token", scale_rewards="group", beta=0.04,
    epsilon=0.2, use_bias_correction_kl=False, bf16=False,
)  # fmt: skip
PAGE_BATCH = dict(num_generations=4, per_device_train_batch_size=4)


class Clock(TrainerCallback):
    """CPU seconds of each step."""

    def __init__(self):
        self.ticks = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.ticks.append(time.process_time())

    def on_step_end(self, args, state, control, **kwargs):
        self.ticks.append(time.process_time())

    def seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.ticks, self.ticks[1:], strict=False)][WARM_UP:]


def grpo_trainer(**arguments) -> tuple[GRPOTrainer, Clock]:
    """GRPO on prime sums with the given arguments of GRPOConfig."""
    clock = Clock()
    trainer = GRPOTrainer(
        model=str(checkpoint("prime-sums")),
        reward_funcs=exact_match,
        args=GRPOConfig(**arguments),
        processing_class=load("prime-sums")[1],
        train_dataset=problems(PRIME_SUMS, 100, seed=0),
        callbacks=[clock],
    )
    return trainer, clock


def configurations() -> dict[str, dict]:
    """Arguments by name: the page's and the preset's, each at its own batch and at the other's."""
    row = preset("grpo")
    ours = row.arguments(max_completion_length=PRIME_SUMS.max_new_tokens, **PAGE)
    printed = dict(output_dir=ours["output_dir"], use_cpu=True, **PAGE)
    preset_batch = dict(
        num_generations=row.group_size, per_device_train_batch_size=row.batch_size
    )
    return {
        "page": printed | PAGE_BATCH,
        "preset": ours,
        "page, the preset's batch": printed | preset_batch,
        "preset, the page's batch": ours | PAGE_BATCH,
    }


def throughput(rounds: int = 2) -> dict[str, float]:
    """Completions per CPU second of each configuration, taken in turn `rounds` times."""
    seconds = {name: [] for name in configurations()}
    for _ in range(rounds):
        for name, arguments in configurations().items():
            steps = 60 if arguments["per_device_train_batch_size"] <= 4 else 20
            trainer, clock = grpo_trainer(**arguments | dict(max_steps=WARM_UP + steps))
            train(trainer)
            seconds[name] += clock.seconds()
    return {
        name: configurations()[name]["per_device_train_batch_size"] / statistics.median(values)
        for name, values in seconds.items()
    }


def step_shares(steps: int = 40) -> dict[str, float]:
    """Share of the preset's step by what it is spent on, largest first; they sum to 1."""
    trainer, clock = grpo_trainer(
        **configurations()["preset"] | dict(max_steps=WARM_UP + steps)
    )
    spent: Counter = Counter()
    running: list[list] = []  # what is being timed now: [name, seconds of what it called]

    @contextmanager
    def timed(name: str):
        began = time.process_time()
        running.append([name, 0.0])
        try:
            yield
        finally:
            elapsed = time.process_time() - began
            _, inner = running.pop()
            if len(clock.ticks) > WARM_UP:
                spent[name] += elapsed - inner
            if running:
                running[-1][1] += elapsed

    def watch(owner: object, method: str, name: str) -> None:
        """Time a method of TRL's or torch's; it runs as ever."""
        original = getattr(owner, method)

        def wrapped(*args, **kwargs):
            with timed(name):
                return original(*args, **kwargs)

        setattr(owner, method, wrapped)

    watch(trainer, "_generate_single_turn", "generation")
    watch(trainer, "_get_per_token_logps_and_entropies", "forward (policy, reference, entropy)")
    watch(trainer.accelerator, "backward", "backward")
    watch(trainer, "_compute_loss", "loss lines and their metrics")
    watch(trainer, "_calculate_rewards", "rewards")
    watch(trainer, "_generate_and_score_completions", "padding, decoding, advantages")
    watch(trainer, "_tokenize_prompts", "tokenization")
    watch(trainer, "log", "logging")
    watch(trainer.accelerator, "clip_grad_norm_", "gradient clipping")
    trainer.create_optimizer()
    watch(trainer.optimizer, "step", "optimiser")
    train(trainer)
    total = sum(clock.seconds())
    spent["rest (Trainer's loop, data loader)"] = total - sum(spent.values())
    return {name: seconds / total for name, seconds in spent.most_common()}


def loss_ratios() -> dict[str, tuple[float, float]]:
    """Milliseconds of forward and backward at (64, 512): ours, and the arithmetic of TRL's lines.

    TRL's lines stand inside a method that also runs the model and logs; so they are written here
    again without either, as the support page has them.
    """
    rows, time_ = 64, 512
    g = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(rows, time_, generator=g)
    logps = (old + 0.1 * torch.randn(rows, time_, generator=g)).requires_grad_()
    ref = old + 0.1 * torch.randn(rows, time_, generator=g)
    mask = (torch.arange(time_) < torch.randint(1, time_, (rows, 1), generator=g)).int()
    advantages = torch.randn(rows, generator=g)

    def surrogate(ratios: Tensor, low: float, high: float) -> Tensor:
        a = advantages[:, None]
        return -torch.min(ratios * a, ratios.clamp(1 - low, 1 + high) * a)

    def response_mean(values: Tensor) -> Tensor:
        return ((values * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()

    def plain_grpo() -> Tensor:
        d = ref - logps
        return response_mean(surrogate((logps - old).exp(), 0.2, 0.2) + 0.04 * (d.exp() - d - 1))

    def plain_gspo() -> Tensor:
        mean = ((logps - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
        return response_mean(surrogate(mean.exp()[:, None], 4e-4, 4e-4))

    def plain_sum(low: float, high: float) -> Tensor:
        return (surrogate((logps - old).exp(), low, high) * mask).sum()

    batch = logps, old, advantages, mask
    pairs = {
        "grpo_loss, β = 0": (
            lambda: grpo_loss(*batch, 0.2),
            lambda: response_mean(surrogate((logps - old).exp(), 0.2, 0.2)),
        ),
        "grpo_loss, β = 0.04": (lambda: grpo_loss(*batch, 0.2, ref, 0.04), plain_grpo),
        "dr_grpo_loss": (
            lambda: dr_grpo_loss(*batch, 0.2, time_), lambda: plain_sum(0.2, 0.2) / (rows * time_)
        ),
        "dapo_loss": (
            lambda: dapo_loss(*batch, 0.2, 0.28),
            lambda: plain_sum(0.2, 0.28) / mask.sum().clamp(min=1),
        ),
        "gspo_loss": (lambda: gspo_loss(*batch, 4e-4), plain_gspo),
    }  # fmt: skip

    def milliseconds(loss_of: Callable[[], Tensor], repeats: int) -> float:
        began = time.process_time()
        for _ in range(repeats):
            logps.grad = None
            loss_of().backward()
        return 1e3 * (time.process_time() - began) / repeats

    results = {}
    for name, (ours, plain) in pairs.items():
        torch.testing.assert_close(ours(), plain())
        turns = [(milliseconds(ours, 30), milliseconds(plain, 30)) for _ in range(15)]
        results[name] = tuple(statistics.median(column) for column in zip(*turns, strict=True))
    return results


def report() -> str:
    """Everything measured, as Markdown."""
    with tqdm(total=3, desc="bench") as bar:
        speed = throughput()
        bar.update()
        shares = step_shares()
        bar.update()
        losses = loss_ratios()
        bar.update()

    lines = [f"{machine()}; one thread, CPU seconds, medians.", ""]
    lines += ["| GRPO on prime sums | completions / s |", "|---|---:|"]
    lines += [f"| {name} | {value:,.0f} |" for name, value in speed.items()]
    page, ours, page_wide, ours_narrow = speed.values()
    lines += [
        "",
        f"The preset makes {ours / page:.1f} × the completions of the page's config (4 at a time); "
        f"at equal batch {ours / page_wide:.2f} × (128) and {ours_narrow / page:.2f} × (4).",
        "",
        "| share of the preset's step | |",
        "|---|---:|",
    ]
    lines += [f"| {name} | {share:.1%} |" for name, share in shares.items()]
    model = sum(
        share for name, share in shares.items()
        if name.split()[0] in ("generation", "forward", "backward")
    )  # fmt: skip
    lines += [
        "",
        f"Generation, forward and backward: {model:.0%}.",
        "",
        "| loss, forward + backward at (64, 512) | ms | TRL's arithmetic, ms | ratio |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {ours:.2f} | {plain:.2f} | {ours / plain:.2f} |"
        for name, (ours, plain) in losses.items()
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into RUNTIMES.md")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    quiet()
    written = report()
    print(written)
    if options.write:
        update_section("bench", written)


if __name__ == "__main__":
    main()
