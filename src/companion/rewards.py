"""Verifiers and reward functions for TRL's trainers, on plain and on chat completions.

TRL calls a reward function with keywords: `prompts`, `completions`, `completion_ids`, one list for
each data column, and a few of its own. It logs the mean as `rewards/<__name__>/mean`. None in
place of a reward is "not scored": TRL leaves the row out of means and of the group's advantages.

Nothing here runs, or converts to a number, what a model wrote: texts are only compared. Time is
linear in the text, so no function needs a timeout, and all of them run in any thread.
"""

import inspect
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from numbers import Real

import torch

from companion.losses import overlong_penalty
from companion.losses.checks import check_positive

Completion = str | list[dict]
RewardFunction = Callable[..., list[float] | list[float | None]]

FORMAT = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
OUTSIDE_COST = 0.001  # of `incremental_format_reward`, for a character outside the blocks


def completion_text(completion: Completion) -> str:
    """The text of a completion: the string itself, or the content of its last assistant message.

    A message without a role is the assistant's; no content is ""; the text blocks of a content
    are joined.

    Raises:
        TypeError: neither a string nor a list of messages, or a content of another type.
        ValueError: no assistant message.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list) or not all(isinstance(m, dict) for m in completion):
        raise TypeError(f"completion must be a string or messages, got {completion!r:.80}")
    contents = [m.get("content") for m in completion if m.get("role", "assistant") == "assistant"]
    if not contents:
        raise ValueError(f"completion has no assistant message: {completion!r:.80}")
    content = "" if contents[-1] is None else contents[-1]
    if isinstance(content, list):
        content = "".join(block["text"] for block in content if block.get("type") == "text")
    if not isinstance(content, str):
        raise TypeError(f"content must be a string or a list of blocks, got {content!r:.80}")
    return content


# What looks like a number, with all that could make it something else. Every repetition is bounded
# or possessive and a digit once matched is not scanned again, so that time is linear.
_TOKEN = re.compile(
    r"""
      # digits of a name: x1, GPT-4, a_1, cm^2
    (?: (?P<name> (?: [A-Za-z][-_]? | [)}\]]_ | \^\{?[+-]? ) (?=[0-9]) )
      # ±7, \frac{3}{4}
      | (?P<before> [√±] | \{[ ]{0,2} )?  (?P<sign> (?: [+-][ ]{0,2} | [$¥€£][ ]? ){0,3} ) )
      # .5, but not the full stop in "です.77"
    (?P<run> (?: (?<! [^\s(\[{$¥€£+-] ) \. )?  [0-9]
      # 1,234.5, and 12:30; 3/4, 2 + 3; 1e3; 10^{-3}; 3万
      (?: [0-9]++ | [.,:_'](?=[0-9]) | [ ]{0,2}[-+*/×÷][ ]{0,2}(?=[0-9])
        | [eE][+-]?(?=[0-9]) | \^\{?[+-]?(?=[0-9]) | [十百千万億兆] )*+ )
      # 7², 7½, 2^n, but 77^\circ
    (?P<after> [⁰¹²³⁴-⁹½⅓⅔¼¾] | \^(?!\{?\\circ) )?
    """,
    re.VERBOSE,
)
_PLAIN = re.compile(r"(?:[0-9]++|[0-9]{1,3}(?:,[0-9]{3})++)?(?:\.[0-9]++)?")
_SPECIAL = re.compile(r"<[|｜][^<>]*[|｜]>|</?s>|<(?:bos|eos|pad|end_of_turn)>")
_BULLET = re.compile(r"^[ \t]*+- +", re.MULTILINE)
_MINUS = re.compile(r"マイナス|\b(?:minus|negative)\b", re.IGNORECASE)
_LATEX_TEXT = re.compile(r"\\(?:text|math)[a-z]*\s*+\{|\\[ ;:]|\\(?=[$%])")
# full-width ASCII, and the minus signs and hyphens that stand for "-"
_ASCII = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_ASCII |= dict.fromkeys(map(ord, "−‐‑–﹣"), "-") | {ord("　"): " ", ord("￥"): "¥"}


def extract_answer(text: str) -> str | None:
    r"""The number that a text gives as its answer, as a plain decimal: "1234", "-7", "0.5".

    Where to look is narrowed down, each step inside what the one before it found:

    1. to the last closed ``<answer>…</answer>``, where there is one, even if it is empty;
    2. to the last closed ``\boxed{…}``, likewise;
    3. after ``####``, else after 「答えは」, where there is one: to the first number after the last
       of them that has any;
    4. else to the last number.

    Full-width characters count as ASCII; −, マイナス, minus and negative as -. Commas between
    groups of three, currency signs, units (77点, 77%), ``\text{}`` and special tokens are dropped,
    and what makes no difference to the value: +7 is "7", -0 "0", 007 "7", 1.50 "1.5". A hyphen
    and a space at the start of a line are a bullet. Digits of a name (x1, GPT-4, cm^2) are passed
    over.

    Whatever else looks like a number is not computed; where it is the one to read, the answer is
    None: 3/4, 1e3, 10^3, 2+3, ±7, 3万, 1,23, 12:30, 2024-05-06, \frac{3}{4}. 「十」 is no number.
    """
    text = _MINUS.sub("-", _BULLET.sub("", _SPECIAL.sub(" ", text)).translate(_ASCII))
    for narrow in (_last_tagged, _last_boxed):
        content = narrow(text)
        text = text if content is None else content
    for marker in ("####", "答えは"):
        if marker in text:
            parts = reversed(text.split(marker)[1:])
            return _decimal(next((token for part in parts for token in _tokens(part)), None))
    last = deque(_tokens(text), maxlen=1)
    return _decimal(last[0] if last else None)


def _last_tagged(text: str) -> str | None:
    pieces = re.split(r"(</?answer>)", text)
    for i in range(len(pieces) - 3, 1, -2):
        if pieces[i - 1] == "<answer>" and pieces[i + 1] == "</answer>":
            return pieces[i]
    return None


def _last_boxed(text: str) -> str | None:
    start, end, open_braces = -1, -1, []
    for m in re.finditer(r"(?P<box>\\boxed\s*+\{)|\\.|[{}]", text, re.DOTALL):
        if m["box"] or m[0] == "{":
            open_braces.append(m.end() if m["box"] else -1)
        elif m[0] == "}" and open_braces and (opened := open_braces.pop()) > start:
            start, end = opened, m.start()
    return text[start:end] if start >= 0 else None


def _tokens(text: str) -> Iterator[re.Match]:
    text = text.replace("{,}", ",").replace(r"\,", "").replace(r"\!", "")  # 1{,}234, 1\,234
    return (m for m in _TOKEN.finditer(_LATEX_TEXT.sub(" ", text)) if m["name"] is None)


def _decimal(token: re.Match | None) -> str | None:
    if token is None or token["before"] or token["after"] or not _PLAIN.fullmatch(token["run"]):
        return None
    signs = re.findall("[+-]", token["sign"])
    if len(signs) > 1:
        return None
    # as strings: int() refuses long ones, float() rounds them
    whole, _, fraction = token["run"].replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return f"-{value}" if signs == ["-"] and value != "0" else value


def exact_match(
    completions: Sequence[Completion], ground_truth: Sequence | None = None, **columns
) -> list[float]:
    """1 where the completion is the ground truth to the letter, blanks around them aside, else 0.

    The reward of section 5.3.1's listing, and its limit: 「77です。」 is no 77.

    Raises:
        KeyError: there is no column `ground_truth`; names those that there are.
        TypeError: a ground truth that is no string, which could never match; names the row.
        ValueError: a column with another number of rows than `completions`.
    """
    truths = _column("ground_truth", ground_truth, completions, columns)
    for i, truth in enumerate(truths):
        if not isinstance(truth, str):
            raise TypeError(f"ground_truth[{i}] must be a string, got {truth!r:.80}")
    return [
        float(text.strip() == truth.strip())
        for text, truth in zip(_texts(completions), truths, strict=True)
    ]


def accuracy_reward(
    completions: Sequence[Completion], ground_truth: Sequence | None = None, **columns
) -> list[float]:
    """1 where `extract_answer` finds the ground truth's value in the completion, else 0.

    Ground truths are numbers, or texts from which `extract_answer` reads one. Values are compared
    as decimals: where leading zeros count (066778), take `exact_match`.

    Raises:
        KeyError: there is no column `ground_truth`; names those that there are.
        ValueError: a ground truth that is no decimal number (names the row), or a column with
            another number of rows than `completions`. No completion raises.
    """
    truths = []
    for i, truth in enumerate(_column("ground_truth", ground_truth, completions, columns)):
        if isinstance(truth, int | float | Decimal) and not isinstance(truth, bool):
            truth = format(Decimal(str(truth)), "f")  # 1e+22 in full
        value = extract_answer(truth) if isinstance(truth, str) else None
        if value is None:
            raise ValueError(f"ground_truth[{i}] is {truth!r:.80}: no decimal number")
        truths.append(value)
    return [
        float(extract_answer(text) == truth)
        for text, truth in zip(_texts(completions), truths, strict=True)
    ]


def format_reward(completions: Sequence[Completion], **columns) -> list[float]:
    """1 for `<reasoning>…</reasoning>` then `<answer>…</answer>`, else 0.

    Each tag once, in this order, and nothing but blanks outside the two blocks; special tokens
    at the end do not matter. What stands in the blocks is not judged; it may have many lines.
    """
    blocks = map(_blocks, _texts(completions))
    return [float(tags == FORMAT and not any(outside)) for tags, outside in blocks]


def incremental_format_reward(completions: Sequence[Completion], **columns) -> list[float]:
    """Partial credit on the way to `format_reward`: from 0 to 1, and 1 exactly where that is 1.

    A quarter for each tag that occurs once and stands after the credited ones before it, less
    `OUTSIDE_COST` for each character outside the blocks.
    """
    rewards = []
    for tags, outside in map(_blocks, _texts(completions)):
        score, position = 0.0, -1
        for tag in FORMAT:
            if tags.count(tag) == 1 and tags.index(tag) > position:
                score, position = score + 0.25, tags.index(tag)
        rewards.append(max(0.0, score - OUTSIDE_COST * sum(map(len, outside))))
    return rewards


def _blocks(text: str) -> tuple[tuple[str, ...], list[str]]:
    """The four tags as they come, and the texts outside the blocks."""
    pieces = re.split(r"(</?(?:reasoning|answer)>)", text)
    pieces[-1] = _SPECIAL.sub("", pieces[-1])
    tags = tuple(pieces[1::2])
    outside = [
        piece.strip()
        for piece, left, right in zip(pieces[::2], ("", *tags), (*tags, ""), strict=True)
        if left not in FORMAT[::2] and right not in FORMAT[1::2]
    ]
    return tags, outside


def length_reward(target: int) -> RewardFunction:
    """Make a reward for completions of about `target` tokens: 1 there, 0 at 0 and from twice that.

    Lengths are those of TRL's `completion_ids`, the end token included, as in `overlong_reward`.

    Raises:
        TypeError, ValueError: the target is no number above 0.
    """
    check_positive(target=target)

    def reward(completions, completion_ids=None, **columns):
        ids = _column("completion_ids", completion_ids, completions, columns)
        return [max(0.0, 1 - abs(len(row) - target) / target) for row in ids]

    reward.__name__ = "length_reward"
    return reward


def overlong_reward(max_length: int, cache: int) -> RewardFunction:
    """Make the length penalty (5.15) of L_max = `max_length` and L_cache = `cache`, in tokens.

    0 up to L_max - L_cache, then linearly down to -1 at L_max, and -1 beyond. Lengths are those of
    TRL's `completion_ids`, the end token included. TRL cuts completions at
    `max_completion_length`: with that for L_max none is longer, and a cut one gets -1 (0 where
    L_cache is 0).

    Raises:
        TypeError, ValueError: as `overlong_penalty`, which computes it.
    """
    overlong_penalty(torch.ones(1), max_length, cache)  # bad sizes fail here, not in the first step

    def reward(completions, completion_ids=None, **columns):
        ids = _column("completion_ids", completion_ids, completions, columns)
        lengths = torch.tensor([len(row) for row in ids], dtype=torch.float64)
        return overlong_penalty(lengths, max_length, cache).tolist()

    reward.__name__ = "overlong_reward"
    return reward


def combine(functions: Sequence[RewardFunction], weights: Sequence[Real]) -> RewardFunction:
    """Make one reward function of several: the weighted sum, named `first_and_second`.

    As with TRL's `reward_weights`, a None or NaN of a part is left out of the row's sum; a row
    that no part scored is None.

    Raises:
        TypeError: a function that is no function, or an async one.
        ValueError: no functions, another number of weights, or a weight that is not finite. When
            called: a part that returns another number of rewards than completions.
    """
    if not functions or len(functions) != len(weights):
        raise ValueError(f"weights: {len(weights)} of them for {len(functions)} functions")
    for i, (function, weight) in enumerate(zip(functions, weights, strict=True)):
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise TypeError(f"functions[{i}] must be a plain reward function, got {function!r}")
        if not isinstance(weight, Real) or not math.isfinite(weight):
            raise ValueError(f"weights[{i}] must be a finite number, got {weight!r}")
    names = [_name(function) for function in functions]

    def reward(completions, **columns):
        parts = [function(completions=completions, **columns) for function in functions]
        for name, part in zip(names, parts, strict=True):
            if len(part) != len(completions):
                raise ValueError(f"{name}: {len(part)} rewards, {len(completions)} completions")
        rewards = []
        for row in zip(*parts, strict=True):
            scored = [w * r for w, r in zip(weights, row, strict=True) if not _unscored(r)]
            rewards.append(math.fsum(scored) if scored else None)
        return rewards

    reward.__name__ = "_and_".join(names)
    return reward


def guarded(verifier: Callable[[str, object], Real | None]) -> RewardFunction:
    """Make a reward function of a verifier (completion text, ground truth) -> reward.

    Where the verifier raises, the row is None: not scored, which is not the same as wrong. The
    reward function's `errors` counts these rows, and TRL logs their share as
    `rewards/<name>/errors`. The verifier runs in the caller's thread; one that may hang has to
    limit itself, and not by signals, which only a main thread gets.

    Raises:
        RuntimeError: when called and the verifier raised on every completion; the first of its
            errors is the cause.
        KeyError, ValueError: as `exact_match`.
    """
    name = _name(verifier)

    def reward(completions, ground_truth=None, log_metric=None, **columns):
        truths = _column("ground_truth", ground_truth, completions, columns)
        rewards, errors = [], []
        for text, truth in zip(_texts(completions), truths, strict=True):
            try:
                value = verifier(text, truth)
                rewards.append(None if _unscored(value) else float(value))
            except Exception as error:
                errors.append(error)
                rewards.append(None)
        reward.errors += len(errors)
        if errors and len(errors) == len(rewards):
            raise RuntimeError(f"{name} raised on all {len(errors)} completions") from errors[0]
        if log_metric is not None:
            log_metric(f"rewards/{name}/errors", len(errors) / len(rewards))
        return rewards

    reward.__name__, reward.errors = name, 0
    return reward


def _name(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)  # as TRL names it


def _unscored(reward: Real | None) -> bool:
    return reward is None or math.isnan(reward)


def _texts(completions: Sequence[Completion]) -> list[str]:
    if isinstance(completions, str):
        raise TypeError("completions must be a list of completions, got one string")
    return [completion_text(completion) for completion in completions]


def _column(name: str, values: Sequence | None, completions: Sequence, columns: dict) -> Sequence:
    if values is None:
        own = {"prompts", "completion_ids", "trainer_state", "log_extra", "log_metric"}  # TRL's
        raise KeyError(f"no column {name!r}; the columns are {sorted(columns.keys() - own)}")
    if isinstance(values, str):
        raise TypeError(f"{name} must be a list, one item a completion, got one string")
    if len(values) != len(completions):
        raise ValueError(f"{name} has {len(values)} rows, completions has {len(completions)}")
    return values
