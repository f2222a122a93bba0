"""Two small tasks with a known right answer, a known true reward, and data drawn from both.

The true reward of a task is hidden from the model: it labels the preferences and measures what
was learned. A task's demonstrations are right only part of the time, and each mistake is one
that somebody could make.
"""

import functools
import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

EXACT_BONUS = 2.0


@dataclass(frozen=True)
class Task:
    """Prompts, their answers, the usual mistakes and the true reward of one task.

    Attributes:
        train_prompts: what data is made from.
        test_prompts: what accuracy is measured on.
        max_new_tokens: enough for every answer and its end token.
        answer: prompt -> the right completion.
        mistake: prompt, random generator -> a plausible completion that is not the right one.
        reward: prompt, completion -> the true reward r(x, y), from 0 (not even an answer) to 8:
            up to 6 for a close answer, `EXACT_BONUS` more for the right one. A completion is
            compared, never evaluated; whatever is not a well-formed answer gets 0.
    """

    name: str
    train_prompts: tuple[str, ...]
    test_prompts: tuple[str, ...]
    max_new_tokens: int
    answer: Callable[[str], str]
    mistake: Callable[[str, np.random.Generator], str]
    reward: Callable[[str, object], float]


# Prime sums: "20未満の素数の合計は？" -> "77". The hundred prompts are learned by heart, so the
# prompts to train on and to test on are the same.


@functools.cache
def _primes_below(n: int) -> tuple[int, ...]:
    return tuple(p for p in range(2, n) if all(p % q for q in range(2, math.isqrt(p) + 1)))


def _limit(prompt: str) -> int:
    match = re.fullmatch(r"([3-9]|[1-9][0-9]{1,2})未満の素数の合計は？", prompt)
    if match is None:
        raise ValueError(f"prompt: not a prime-sums prompt: {prompt!r}")
    return int(match[1])


def _prime_sum(prompt: str) -> str:
    return str(sum(_primes_below(_limit(prompt))))


def _prime_sum_mistake(prompt: str, rng: np.random.Generator) -> str:
    n = _limit(prompt)
    primes = _primes_below(n)
    total = sum(primes)
    wrong = [
        total + 1,  # counts 1
        total - 2,  # forgets 2
        total + 9,  # counts 9
        total - primes[-1],  # forgets the last one
        total + n,  # counts n itself
    ]
    return str(wrong[rng.integers(len(wrong))])


def _prime_sum_reward(prompt: str, completion: object) -> float:
    right = _prime_sum(prompt)
    if not _is_written(r"0|[1-9][0-9]{0,5}", completion):
        return 0.0
    # 6 at the right sum, 0 where the error is as large as the sum
    closeness = max(0.0, 1 - abs(int(completion) - int(right)) / int(right))
    return 6 * closeness + EXACT_BONUS * (completion == right)


_prime_prompts = tuple(f"{n}未満の素数の合計は？" for n in range(3, 103))
PRIME_SUMS = Task(
    name="prime-sums",
    train_prompts=_prime_prompts,
    test_prompts=_prime_prompts,
    max_new_tokens=8,
    answer=_prime_sum,
    mistake=_prime_sum_mistake,
    reward=_prime_sum_reward,
)


# Sorting: "780667>" -> "066778". Held out are all prompts of about a tenth of the answers: no
# rearrangement of a test prompt's digits is ever trained on.


def _sorted_digits(prompt: str) -> str:
    if not _is_written(r"[0-9]{6}>", prompt):
        raise ValueError(f"prompt: not a sorting prompt: {prompt!r}")
    return "".join(sorted(prompt[:6]))


def _sorting_mistake(prompt: str, rng: np.random.Generator) -> str:
    right = _sorted_digits(prompt)
    while True:  # each digit is wrong with probability 0.15, one at least
        shift = rng.integers(1, 10, size=6) * (rng.random(6) < 0.15)
        if shift.any():
            return "".join(str((int(d) + s) % 10) for d, s in zip(right, shift, strict=True))


def _sorting_reward(prompt: str, completion: object) -> float:
    right = _sorted_digits(prompt)
    if not _is_written(r"[0-9]{6}", completion):
        return 0.0
    # one point for each digit in its place
    places = sum(a == b for a, b in zip(completion, right, strict=True))
    return places + EXACT_BONUS * (completion == right)


def _sorting_prompts(train: int, test: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    rng = np.random.default_rng(0)
    kept, held_out = {}, {}  # dicts, as sets that keep their order
    while len(kept) < train or len(held_out) < test:
        prompt = f"{rng.integers(10**6):06d}>"
        is_held_out = zlib.crc32(_sorted_digits(prompt).encode("ascii")) % 10 == 0
        chosen, size = (held_out, test) if is_held_out else (kept, train)
        if len(chosen) < size:
            chosen[prompt] = None
    return tuple(kept), tuple(held_out)


def _is_written(pattern: str, text: object) -> bool:
    return isinstance(text, str) and re.fullmatch(pattern, text) is not None


_train, _test = _sorting_prompts(train=20_000, test=500)
SORTING = Task(
    name="sorting",
    train_prompts=_train,
    test_prompts=_test,
    max_new_tokens=8,
    answer=_sorted_digits,
    mistake=_sorting_mistake,
    reward=_sorting_reward,
)

TASKS = {task.name: task for task in (PRIME_SUMS, SORTING)}


def accuracy(task: Task, prompts: Sequence[str], completions: Sequence[str]) -> float:
    """The share of completions that are exactly the right answer."""
    if not prompts:
        raise ValueError("prompts: is empty")
    if len(prompts) != len(completions):
        raise ValueError(f"completions: {len(completions)} for {len(prompts)} prompts")
    answers = map(task.answer, prompts)
    return sum(a == b for a, b in zip(answers, completions, strict=True)) / len(prompts)


def problems(task: Task, n: int, *, seed: int) -> Dataset:
    """Draw `n` problems for training by verifiable reward.

    Returns:
        A data set with the columns `prompt` and `ground_truth`, the names of the book's support
        page. Every training prompt comes once before any comes twice.
    """
    if n < 1:
        raise ValueError(f"n: must be at least 1, got {n}")
    prompts = _draw_prompts(task, n, np.random.default_rng(seed))
    return Dataset.from_list([{"prompt": x, "ground_truth": task.answer(x)} for x in prompts])


def demonstrations(task: Task, n: int, *, right: float = 0.4, seed: int) -> Dataset:
    """Draw `n` demonstrations: the right answer with probability `right`, else a mistake.

    Returns:
        A data set with the columns `prompt` and `completion`. Every training prompt comes once
        before any comes twice.
    """
    _check(n, right, right <= 1)
    rng = np.random.default_rng(seed)
    rows = [
        {"prompt": prompt, "completion": _demonstration(task, prompt, right, rng)}
        for prompt in _draw_prompts(task, n, rng)
    ]
    return Dataset.from_list(rows)


def preferences(task: Task, n: int, *, right: float = 0.4, seed: int) -> Dataset:
    """Draw `n` preference pairs, labelled under Bradley-Terry by the task's true reward.

    Both responses of a pair are demonstrations that differ. The first is the chosen one with
    probability sigmoid(r(x, y1) - r(x, y2)), so a worse response is preferred now and then, and
    of two mistakes with equal reward either is.

    Returns:
        A data set with the columns `prompt`, `chosen` and `rejected`. Every training prompt
        comes once before any comes twice.
    """
    _check(n, right, right < 1)
    rng = np.random.default_rng(seed)
    rows = []
    for prompt in _draw_prompts(task, n, rng):
        first = second = _demonstration(task, prompt, right, rng)
        while first == second:
            first = _demonstration(task, prompt, right, rng)
            second = _demonstration(task, prompt, right, rng)
        margin = task.reward(prompt, first) - task.reward(prompt, second)
        if rng.random() < 1 / (1 + math.exp(-margin)):
            rows.append({"prompt": prompt, "chosen": first, "rejected": second})
        else:
            rows.append({"prompt": prompt, "chosen": second, "rejected": first})
    return Dataset.from_list(rows)


def _demonstration(task: Task, prompt: str, right: float, rng: np.random.Generator) -> str:
    return task.answer(prompt) if rng.random() < right else task.mistake(prompt, rng)


def _draw_prompts(task: Task, n: int, rng: np.random.Generator) -> list[str]:
    rounds = math.ceil(n / len(task.train_prompts))
    order = np.concatenate([rng.permutation(len(task.train_prompts)) for _ in range(rounds)])
    return [task.train_prompts[i] for i in order[:n]]


def _check(n: int, right: float, in_range: bool) -> None:
    if n < 1:
        raise ValueError(f"n: must be at least 1, got {n}")
    if not (right >= 0 and in_range):
        raise ValueError(f"right: not a probability that can be used here: {right}")
