"""Inputs that broke other reward functions and verifiers, with their right values."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from companion.rewards import (
    accuracy_reward,
    combine,
    completion_text,
    exact_match,
    extract_answer,
    format_reward,
    guarded,
    incremental_format_reward,
    overlong_reward,
)


def rewards(function, texts, truth):
    return function(completions=texts, ground_truth=[truth] * len(texts))


@pytest.mark.parametrize("function", [exact_match, accuracy_reward, guarded(lambda text, y: 1.0)])
def test_a_missing_column_is_named_with_those_that_are_there(function):
    columns = dict(answer=["77"], source=["a"], completion_ids=[[1]], trainer_state=None)
    with pytest.raises(KeyError, match=r"'ground_truth'.*\['answer', 'source'\]"):
        function(prompts=["p"], completions=["77"], **columns)
    with pytest.raises(KeyError, match="'ground_truth'"):
        combine([function], [1.0])(prompts=["p"], completions=["77"], **columns)


def test_one_accessor_for_plain_and_chat():
    chat = [{"role": "assistant", "content": "77"}]
    assert completion_text("77") == completion_text(chat) == "77"
    for function in (exact_match, accuracy_reward):
        assert rewards(function, ["77", chat, "78"], "77") == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("end", ["", "\n", "<eos>", "<|im_end|>", "</s>\n", "<pad><pad>"])
def test_tags_over_several_lines_and_special_tokens(end):
    text = "<reasoning>\n2+3=5\n5+7=12\n</reasoning>\n\n<answer>\n12\n</answer>"
    assert format_reward([text + end]) == [1.0]
    assert format_reward([text + end + "です"]) == [0.0]
    assert rewards(accuracy_reward, [text + end, "12" + end], "12") == [1.0, 1.0]


RIGHT = {
    "77": ["77", "77.", "77。", "７７", "７７．", r"\boxed{77}", "答えは77です",
           "<answer>77</answer>"],
    "1234": ["1234", "1,234", "１，２３４", "$1,234.00", "＄１，２３４．００", "1234.0",
             "答えは1,234です。"],
}  # fmt: skip


@pytest.mark.parametrize("truth", RIGHT)
def test_right_forms(truth):
    assert rewards(accuracy_reward, RIGHT[truth], truth) == [1.0] * len(RIGHT[truth])


@pytest.mark.parametrize(
    "wrong", ["177", "0.77", ".77", "-77", "−77", "－７７", "答えは−77です", r"\boxed{-77}",
              "−$77", "マイナス77", "770", "77.7", "7,7", "77/2", "77万", "7 7"],
)  # fmt: skip
def test_wrong_forms(wrong):
    assert rewards(accuracy_reward, [wrong, "77"], "77") == [0.0, 1.0]


def test_the_limit_of_the_exact_match():
    texts = ["77です。", "７７", "77.", " 77\n"]
    for truth in ("77", "77\n"):
        assert rewards(exact_match, texts, truth) == [0.0, 0.0, 0.0, 1.0]
    assert rewards(accuracy_reward, texts, "77") == [1.0, 1.0, 1.0, 1.0]


def test_in_a_worker_thread():
    def verify(text, truth):
        assert threading.current_thread() is not threading.main_thread()
        return text == truth

    with ThreadPoolExecutor(1) as pool:
        for function in (exact_match, accuracy_reward, guarded(verify)):
            assert pool.submit(rewards, function, ["77", "78"], "77").result() == [1.0, 0.0]


def test_a_verifiers_errors_are_counted_apart():
    def verify(text, truth):
        return int(text) == int(truth)

    function, logged = guarded(verify), {}
    arguments = dict(ground_truth=["77"] * 4, log_metric=logged.__setitem__)
    assert function(completions=["77", "七十七", "78", "0"], **arguments) == [1.0, None, 0.0, 0.0]
    assert logged == {"rewards/verify/errors": 0.25}
    assert function(completions=["77"] * 4, **arguments) == [1.0] * 4
    assert logged == {"rewards/verify/errors": 0.0}
    assert function.errors == 1


def test_all_errors_are_not_reward_0():
    def verify(text, truth):
        raise OSError("the sandbox is down")

    function = guarded(verify)
    with pytest.raises(RuntimeError, match="verify raised on all 2 completions") as caught:
        rewards(function, ["77", "78"], "77")
    assert str(caught.value.__cause__) == "the sandbox is down"
    assert function.errors == 2


@pytest.mark.parametrize("truths", [[77, "77"], [77.0, " 77\n"], ["#### 77", "$77.00"]])
def test_numbers_among_the_ground_truths(truths):
    assert accuracy_reward(completions=["77", "77"], ground_truth=truths) == [1.0, 1.0]


def test_soft_overlong_in_tokens():
    lengths = [80, 81, 90, 100, 101]
    values = overlong_reward(100, 20)(
        completions=["七"] * 5, completion_ids=[[9] * length for length in lengths]
    )
    assert values == pytest.approx([0, -0.05, -0.5, -1, -1], abs=1e-12)


# What a model writes never crashes a verifier, and takes no more than linear time.

PIECES = (
    "9", "1 ", "1,", "1,234", "1 - ", "1e", "1^{", "- ", "-", "- \n", "$ ", " ", "\n", ".", "x-",
    "^{", "{", "}", "\\", "<|", "|>", "#", "答えは", "minus", r"\text{", r"\text", r"\boxed{",
    r"\boxed ", "<answer>", "</answer>", "<reasoning>", "</reasoning>", "<eos>", "\0",
)  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("first, last", [("", ""), ("<answer>1", "x"), (r"\boxed", "</answer>")])
def test_long_texts(piece, first, last):
    texts = [first + piece * (100_000 // len(piece)) + last]
    start = time.process_time()
    assert rewards(accuracy_reward, texts, "77") == rewards(format_reward, texts, "77") == [0.0]
    assert rewards(incremental_format_reward, texts, "77")[0] < 1
    assert time.process_time() - start < 10  # measured: 0.1; a quadratic one takes minutes


def test_a_million_digits():
    digits = "7" * 10**6
    assert extract_answer(f"答えは{digits}.50です") == digits + ".5"
    assert rewards(accuracy_reward, [digits, "7"], digits) == [1.0, 0.0]
