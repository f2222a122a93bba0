"""The reward functions: every rule, any text, and a real run of TRL's trainer."""

import math
import re
from decimal import Decimal

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOConfig, GRPOTrainer

from companion.lm import checkpoint, load
from companion.rewards import (
    accuracy_reward,
    combine,
    completion_text,
    exact_match,
    extract_answer,
    format_reward,
    guarded,
    incremental_format_reward,
    length_reward,
    overlong_reward,
)
from companion.training import train

WELL_FORMED = "<reasoning>2+3+5</reasoning>\n<answer>10</answer>"


def chat(text):
    return [{"role": "assistant", "content": text}]


def ids(*lengths):
    return [[7] * length for length in lengths]


# The text of a completion.


@pytest.mark.parametrize(
    "completion, text",
    [
        ("77\n", "77\n"),
        (chat("77\n"), "77\n"),
        ([{"content": "77"}], "77"),
        (chat(None), ""),
        (chat([{"type": "text", "text": t} for t in "78"]), "78"),
        (chat([{"type": "image"}, {"type": "reasoning", "text": "7"}]), ""),
        (chat("let me see") + [{"role": "tool", "content": "5"}] + chat("77"), "77"),
        (chat("77") + [{"role": "tool", "content": "5"}], "77"),
    ],
)  # fmt: skip
def test_completion_text(completion, text):
    assert completion_text(completion) == text


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "completion, error, match",
    [
        (77, TypeError, "must be a string or messages, got 77"),
        (chat("77")[0], TypeError, "must be a string or messages"),
        (["77"], TypeError, "must be a string or messages"),
        (chat(77), TypeError, "content must be a string or a list of blocks, got 77"),
        ([], ValueError, "no assistant message"),
        ([{"role": "user", "content": "77"}], ValueError, "no assistant message"),
    ],
)
def test_what_is_no_completion(completion, error, match):
    with pytest.raises(error, match=match):
        completion_text(completion)


# The answer in a text.


@pytest.mark.parametrize(
    "text, answer",
    [
        # each place before the ones after it, however they are ordered in the text
        ("7 <answer>1</answer> \\boxed{2} #### 3 答えは4 5", "1"),
        ("7 5 答えは4 #### 3 \\boxed{2} <answer>1</answer> 6", "1"),
        ("5 答えは4 #### 3 \\boxed{2} 6", "2"),
        ("5 答えは4 #### 3 6", "3"),
        ("5 答えは4 6", "4"),
        ("5 6", "6"),
        # the last of several; what is not closed is no place
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>1<answer>2</answer></answer>", "2"),
        ("<answer>1</answer><answer>2", "1"),
        ("<answer>1", "1"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed{1 \boxed{2}}", "2"),
        ("#### 1\n#### 2", "2"),
        ("答えは何？ 答えは1です。この答えは正しい。", "1"),
        ("答えは1です（8個の和）", "1"),
        # a place without a number
        ("77 <answer></answer> 77", None),
        (r"77 \boxed{} 77", None),
        ("77。答えは「十」です", None),
        # one inside the other
        (r"<answer>\boxed{1}（8個）</answer>", "1"),
        ("<answer>答えは1です（8個）</answer>", "1"),
        ("＜answer＞７７＜／answer＞", "77"),
        ("<answer>\n2 + 3\n= 5\n</answer>", "5"),
    ],
)
def test_where_the_answer_is(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "text, answer",
    [
        # the value, not how it is written
        ("+7", "7"), ("−0", "0"), ("-0.00", "0"), ("007", "7"), ("1.50", "1.5"), ("1.0", "1"),
        (".5", "0.5"), ("-.5", "-0.5"), ("１．５", "1.5"), ("1,234,567.80", "1234567.8"),
        # units, currency, marks
        ("77点", "77"), ("77%", "77"), ("77cm", "77"), ("￥1,234", "1234"), ("US$5", "5"),
        ("-$7", "-7"), ("−￥7", "-7"), ("$-7$", "-7"), ("**77**", "77"), ("__77__", "77"),
        ("「７７」", "77"), ("(77)", "77"), ("77!", "77"), ("77、", "77"), ("です．77です", "77"),
        ("...77", "77"), ("2, 3, 5", "5"), ("2、3", "3"), ("1,234, 77", "77"),
        # minus signs, bullets
        ("答え -7", "-7"), ("− 7", "-7"), ("Minus 7", "-7"), ("negative 7", "-7"), ("–7", "-7"),
        ("- 7", "7"), ("- 答え\n  - 7", "7"), ("答え: - 7", "-7"),
        # LaTeX
        (r"\boxed{\text{77}}", "77"), (r"\boxed{ 77 }", "77"), (r"\boxed {77}", "77"),
        (r"\boxed{\mathrm{\textbf{77}}}", "77"), (r"\boxed{77\text{ cm}^2}", "77"),
        (r"\boxed{77^\circ}", "77"), (r"\boxed{77^{\circ}}", "77"), (r"\boxed{1{,}234}", "1234"),
        (r"\boxed{1\,234}", "1234"), (r"\boxed{\$77}", "77"), (r"\boxed{77\%}", "77"),
        (r"\boxed{x = 77}", "77"), (r"\boxed{7 \} 8}", "8"), (r"$77$", "77"),
        # digits of a name
        ("77 x1 GPT-4 a_2 cm^2 m^{3}", "77"), ("x1", None), ("x1.5", None),
        # calculations with their result
        ("2+3=5", "5"), ("10 - 3 = 7", "7"), ("5*7 = 35", "35"),
        # numbers that are not plain decimals
        *((text, None) for text in (
            "3/4", "3 / 4", "1e3", "1E-3", "10^3", "10^{-3}", "1.5×10^3", "2^n", "7²", "7½", "±7",
            "√7", "1,23", "12,34,567", "0,5", "1.2.3", "12:30", "2024-05-06", "2024/5/6", "70–77",
            "3万", "1万2345", "5-3", "2*3", "1_000", "--7", r"\frac{3}{4}", r"\boxed{\frac34}",
            r"\boxed{\frac{ 3 }{ 4 }}", r"\boxed{\sqrt{7}}", r"\boxed{77", "答えは3/4です。",
        )),
        # special tokens, and no numbers
        ("77<eos>", "77"), ("77<|0.00|>", "77"), ("7<|sep|>8", "8"),
        ("", None), ("十", None), ("⑦", None), ("٧", None), ("なし。", None), ("-", None),
    ],
)  # fmt: skip
def test_what_the_answer_is(text, answer):
    assert extract_answer(text) == answer


def full_width(text):
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)


RENDERINGS = [
    "{}", "{}.", "{}。", "{}点", "答えは{}です。", "1+2なので、答えは {} です。3個でした。",
    "#### {}", "<reasoning>1+2</reasoning>\n<answer>\n{}\n</answer><eos>", "$\\boxed{{{}}}$",
    "**{}**", "¥{}", "\\boxed{{\\text{{{}}}}}", "2、3、{}", "1 = {}", "{}.00", "+{}", "0{}", "−{}",
    "- {}", "x = {}\n",
]  # fmt: skip


@given(
    st.integers(0, 10**9), st.sampled_from(RENDERINGS), st.sampled_from(["", ","]), st.booleans()
)
def test_renderings(number, rendering, comma, wide):
    digits = format(number, comma or "d")
    if rendering == "0{}":
        digits = str(number)  # 01,234 would do, 012,345 would not
    if rendering.startswith("−"):
        number = -number
    text = rendering.format(full_width(digits) if wide else digits)
    assert extract_answer(text) == str(number)
    assert accuracy_reward([text, text], [number, number + 1]) == [1.0, 0.0]


@given(st.decimals(-(10**9), 10**9, places=3))
def test_decimals(value):
    answer = extract_answer(f"{value:,f}")
    assert Decimal(answer) == value
    assert accuracy_reward(["答えは" + answer], [float(value)]) == [1.0]


PIECES = [
    "7", "0", "1,234", ".", ",", "-", "−", "+", "$", "^", "_", "{", "}", "\\", "/", "e", " ", "\n",
    "。", "答えは", "####", "\\boxed{", "\\text{", "<|im_end|>", "</s>", "万", "７", "\0", "\ud800",
    "<reasoning>", "</reasoning>", "<answer>", "</answer>",
]  # fmt: skip
TEXTS = st.text() | st.lists(st.sampled_from(PIECES)).map("".join)


@given(TEXTS)
def test_any_text_has_a_plain_decimal_or_none(text):
    answer = extract_answer(text)
    assert answer is None or re.fullmatch(r"(?!-0$)-?(0|[1-9]\d*)(\.\d*[1-9])?", answer, re.ASCII)
    assert answer is None or extract_answer(answer) == answer


@given(TEXTS)
def test_plain_and_chat_agree(text):
    assert completion_text(text) == completion_text(chat(text)) == text
    columns = dict(ground_truth=["77"], completion_ids=ids(3), prompts=["p"], trainer_state=None)
    for function in (
        exact_match, accuracy_reward, format_reward, incremental_format_reward, length_reward(4),
        overlong_reward(8, 4), combine([exact_match, format_reward], [1, 2]), guarded(str.__eq__),
    ):  # fmt: skip
        plain = function(completions=[text], **columns)
        assert plain == function(completions=[chat(text)], **columns)
        assert [type(reward) for reward in plain] == [float]


# Exact match and accuracy.


@given(st.lists(st.tuples(TEXTS, st.sampled_from(["77", "十", "７７"])), min_size=1))
def test_exact_match_is_the_pages(rows):
    completions, truths = [[text if text != "7" else y for text, y in rows], [y for _, y in rows]]
    by_the_page = [float(c.strip() == y) for c, y in zip(completions, truths, strict=True)]
    assert exact_match(completions, truths) == by_the_page


def test_where_leading_zeros_count():
    assert accuracy_reward(["66778"], ["066778"]) == [1.0]
    assert exact_match(["66778", "066778"], ["066778"] * 2) == [0.0, 1.0]


@pytest.mark.parametrize("truth", [None, True, "十", "", "3/4", math.nan, math.inf, ["77"], "1,23"])
def test_a_ground_truth_that_is_no_number_is_named(truth):
    with pytest.raises(ValueError, match=r"ground_truth\[1\] is .*: no decimal number"):
        accuracy_reward(["77", "77"], ["77", truth])


@pytest.mark.parametrize("truth", [77, None])
def test_exact_match_wants_strings(truth):
    with pytest.raises(TypeError, match=rf"ground_truth\[1\] must be a string, got {truth}"):
        exact_match(["77", "77"], ["77", truth])


def test_floats_in_full():
    assert accuracy_reward(["1" + "0" * 22, "0.0000001"], [1e22, 1e-7]) == [1.0, 1.0]


@pytest.mark.bad_input
def test_columns_that_do_not_fit():
    with pytest.raises(ValueError, match="ground_truth has 1 rows, completions has 2"):
        exact_match(["77", "78"], ["77"])
    with pytest.raises(TypeError, match="ground_truth must be a list"):
        accuracy_reward(["77", "78"], "77")
    with pytest.raises(TypeError, match="completions must be a list"):
        format_reward("77")
    for function in (length_reward(4), overlong_reward(8, 4)):
        with pytest.raises(KeyError, match=r"'completion_ids'.*\['answer'\]"):
            function(completions=["77"], answer=["77"])


# Format.


@pytest.mark.parametrize(
    "text, strict, partial",
    [
        (WELL_FORMED, 1, 1),
        (f"\n{WELL_FORMED} \n<eos>", 1, 1),
        (WELL_FORMED.replace("\n", ""), 1, 1),
        ("<reasoning></reasoning><answer></answer>", 1, 1),
        ("10", 0, 0),
        ("<reasoning>2", 0, 0.25),
        ("<reasoning>2</reasoning>", 0, 0.5),
        ("<reasoning>2</reasoning><answer>10", 0, 0.75),
        ("<answer>10</answer>", 0, 0.5),
        ("<answer>10</answer><reasoning>2</reasoning>", 0, 0.5),
        ("</answer><answer></reasoning><reasoning>", 0, 0.25),
        (WELL_FORMED * 2, 0, 0),
        (WELL_FORMED + "<answer>", 0, 0.75),
        (WELL_FORMED + "です", 0, 0.998),
        (f"では、{WELL_FORMED}", 0, 0.997),
        (WELL_FORMED.replace("\n", "12345"), 0, 0.995),
        (f"<eos>{WELL_FORMED}", 0, 0.995),
        (WELL_FORMED + "あ" * 999, 0, 0.001),
        (WELL_FORMED + "あ" * 2000, 0, 0),
        (WELL_FORMED.replace("reasoning", "Reasoning"), 0, 0.5 - 0.001 * 28),
    ],
)
def test_format(text, strict, partial):
    assert format_reward([text]) == [strict]
    assert incremental_format_reward([text]) == pytest.approx([partial], abs=1e-12)


@given(st.lists(st.sampled_from(PIECES[-6:] + PIECES[-4:] * 2), max_size=8).map("".join))
def test_partial_credit_is_1_where_the_format_is_right(text):
    (strict,), (partial,) = format_reward([text]), incremental_format_reward([text])
    assert 0 <= partial <= 1
    assert (partial == 1) == (strict == 1)


# Lengths.


def test_length_reward():
    rewards = length_reward(4)(completions=["七"] * 6, completion_ids=ids(0, 1, 4, 6, 8, 100))
    assert rewards == [0.0, 0.25, 1.0, 0.5, 0.0, 0.0]


@pytest.mark.bad_input
def test_bad_lengths_fail_at_once():
    with pytest.raises(ValueError, match="target must be .* above 0, got 0"):
        length_reward(0)
    with pytest.raises(ValueError, match="cache"):
        overlong_reward(4, 5)


# Combined.


def scores(*values):
    def reward(completions, **columns):
        return list(values)

    return reward


def test_combine_leaves_out_what_is_not_scored():
    parts = [scores(1.0, None, None, math.nan), scores(2.0, 3.0, None, None)]
    assert combine(parts, [0.5, -2])(completions=["7"] * 4) == [-3.5, -6.0, None, None]


@given(
    st.lists(
        st.tuples(*[st.none() | st.floats(-10, 10, width=32)] * 2), min_size=4, max_size=4
    )
)  # fmt: skip
def test_combine_is_trls_sum(rows):
    # TRL's lines, on its tensor of rewards per function
    per_function = torch.tensor([[math.nan if r is None else r for r in row] for row in rows])
    sums = (per_function.double() * torch.tensor([1.0, 0.3]).double()).nansum(dim=1)
    sums[torch.isnan(per_function).all(dim=1)] = math.nan
    reward = combine([scores(*part) for part in zip(*rows, strict=True)], [1, 0.3])
    ours = reward(completions=["7"] * len(rows))
    ours = torch.tensor([math.nan if r is None else r for r in ours], dtype=torch.float64)
    torch.testing.assert_close(ours, sums, atol=1e-6, rtol=0, equal_nan=True)


@pytest.mark.bad_input
def test_what_cannot_be_combined():
    async def later(completions, **columns):
        return [1.0]

    with pytest.raises(ValueError, match="weights: 1 of them for 2 functions"):
        combine([exact_match, format_reward], [1])
    with pytest.raises(ValueError, match="weights: 0 of them for 0 functions"):
        combine([], [])
    with pytest.raises(ValueError, match=r"weights\[1\] must be a finite number, got nan"):
        combine([exact_match, format_reward], [1, math.nan])
    for function in ("exact_match", later):
        with pytest.raises(TypeError, match=r"functions\[0\] must be a plain reward function"):
            combine([function], [1])
    with pytest.raises(ValueError, match="reward: 2 rewards, 1 completions"):
        combine([scores(1.0, 2.0)], [1])(completions=["7"])


# TRL's trainer.


def even_length(text, truth):
    """A verifier that fails on some completions."""
    if text.endswith("7"):
        raise LookupError("no sevens")
    return len(text) % 2 == 0


def trainer(tmp_path, functions, rows, **config):
    tokenizer = load("prime-sums")[1]
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    arguments = dict(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False,
        report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1, max_steps=2,
        learning_rate=1e-3, num_generations=4, per_device_train_batch_size=24,
        max_completion_length=4, seed=0,
    )  # fmt: skip
    return GRPOTrainer(
        model=str(checkpoint("prime-sums")),
        reward_funcs=functions,
        args=GRPOConfig(**(arguments | config)),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
    )


@pytest.mark.parametrize("conversational", [False, True])
def test_a_run_logs_the_means(tmp_path, conversational):
    batches = []

    def record(prompts, completions, completion_ids, ground_truth, **columns):
        assert all(isinstance(c, list) == conversational for c in completions)
        texts = [c[0]["content"] if conversational else c for c in completions]
        batches.append((texts, [len(row) for row in completion_ids], ground_truth))
        return [0.0] * len(completions)

    rows = [("5", "5"), ("6", "10"), ("20", "７７"), ("60", "440"), ("80", "791"), ("100", "1060")]
    rows = [
        {"prompt": f"{n}未満の素数の合計は？", "ground_truth": truth, "level": i}
        for i, (n, truth) in enumerate(rows)
    ]
    if conversational:
        rows = [r | {"prompt": [{"role": "user", "content": r["prompt"]}]} for r in rows]
    verifier = guarded(even_length)
    functions = [
        record, exact_match, accuracy_reward, format_reward, length_reward(3), verifier,
        overlong_reward(4, 3), combine([exact_match, overlong_reward(4, 3)], [1, 0.5]),
    ]  # fmt: skip
    weights = [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0]
    history = train(trainer(tmp_path, functions, rows, reward_weights=weights))

    assert len(history) == len(batches) == 2
    errors = 0
    for (_, row), (texts, lengths, truths) in zip(history.iterrows(), batches, strict=True):
        n = len(texts)
        exact = sum(text == truth for text, truth in zip(texts, truths, strict=True)) / n
        right = [t.isdigit() and int(t) == int(y) for t, y in zip(texts, truths, strict=True)]
        right = sum(right) / n
        close = sum(max(0, 1 - abs(k - 3) / 3) for k in lengths) / n
        overlong = sum({1: 0, 2: -1 / 3, 3: -2 / 3, 4: -1}[k] for k in lengths) / n
        even = [len(text) % 2 == 0 for text in texts if not text.endswith("7")]
        errors += n - len(even)
        # what is compared differs from function to function
        assert 0 < exact < right < 1 and {2, 3, 4} <= set(lengths) and 0 < len(even) < n
        expected = {
            "exact_match": exact,
            "accuracy_reward": right,
            "format_reward": 0,
            "length_reward": close,
            "even_length": sum(even) / len(even),
            "overlong_reward": overlong,
            "exact_match_and_overlong_reward": exact + 0.5 * overlong,
        }
        means = {
            name.split("/")[1]: value
            for name, value in row.items()
            if name.startswith("rewards/") and name.endswith("/mean")
        }
        assert means.pop("record") == 0
        assert means == pytest.approx(expected, abs=1e-6)
        assert row["rewards/even_length/errors"] == pytest.approx(1 - len(even) / n, abs=1e-6)
        total = right + close + sum(even) / n + 3 * exact + 2 * overlong
        assert row["reward"] == pytest.approx(total, abs=1e-6)
    assert verifier.errors == errors


def test_rows_that_are_not_scored_in_trl(tmp_path):
    parts = [scores(1.0, None, 0.0, None), scores(None, None, None, 0.0)]
    rows = [{"prompt": "20未満の素数の合計は？", "ground_truth": "77"}] * 4
    run = trainer(tmp_path, [combine(parts, [1, 1])], rows, per_device_train_batch_size=4)
    run.model.train()
    advantages = run._generate_and_score_completions(rows)["advantages"]
    assert advantages.tolist() == pytest.approx([1.1545, 0, -0.57725, -0.57725], abs=1e-6)
    assert run._metrics["train"]["reward"] == pytest.approx([1 / 3])


def test_a_missing_column_stops_the_run(tmp_path):
    rows = [{"prompt": "20未満の素数の合計は？", "answer": "77"}] * 4
    with pytest.raises(KeyError, match=r"no column 'ground_truth'; the columns are \['answer'\]"):
        train(trainer(tmp_path, [accuracy_reward], rows, per_device_train_batch_size=4))
