"""The tasks' answers, mistakes and rewards, and the data drawn from them."""

import math

import numpy as np
import pytest

from companion.tasks import (
    PRIME_SUMS,
    SORTING,
    TASKS,
    accuracy,
    demonstrations,
    preferences,
    problems,
)

BOTH = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def test_answers():
    assert PRIME_SUMS.answer("20未満の素数の合計は？") == "77"
    assert PRIME_SUMS.answer("3未満の素数の合計は？") == "2"
    assert PRIME_SUMS.answer("102未満の素数の合計は？") == "1161"
    assert SORTING.answer("780667>") == "066778"


def test_prompts():
    assert PRIME_SUMS.train_prompts == PRIME_SUMS.test_prompts
    assert len(set(PRIME_SUMS.train_prompts)) == 100
    assert len(set(SORTING.train_prompts)) == 20_000
    assert len(set(SORTING.test_prompts)) == 500


def test_sorting_holds_out_every_order_of_the_test_digits():
    trained_on = {SORTING.answer(prompt) for prompt in SORTING.train_prompts}
    held_out = {SORTING.answer(prompt) for prompt in SORTING.test_prompts}
    assert not trained_on & held_out


@BOTH
def test_a_mistake_is_well_formed_wrong_and_varied(task):
    rng = np.random.default_rng(0)
    for prompt in task.train_prompts[:50]:
        mistakes = [task.mistake(prompt, rng) for _ in range(50)]
        rewards = [task.reward(prompt, mistake) for mistake in mistakes]
        assert task.answer(prompt) not in mistakes
        assert len(set(mistakes)) > 1
        assert all(0 <= reward <= 6 for reward in rewards)


def test_each_digit_of_a_sorting_mistake_is_wrong_as_often_as_said():
    rng = np.random.default_rng(0)
    prompt = SORTING.train_prompts[0]
    right = SORTING.answer(prompt)
    mistakes = [SORTING.mistake(prompt, rng) for _ in range(4000)]
    wrong = [sum(a != b for a, b in zip(right, mistake, strict=True)) for mistake in mistakes]
    # of six digits, given that one at least is wrong
    assert np.mean(wrong) == pytest.approx(6 * 0.15 / (1 - 0.85**6), abs=0.05)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("066778", 8),
        ("066779", 5),
        ("166779", 4),
        ("199999", 0),
        ("06677", 0),
        ("0667788", 0),
        ("066778 ", 0),
        ("066778\n", 0),
        ("答えは066778", 0),
        ("０６６７７８", 0),
        ("٠٦٦٧٧٨", 0),
        ("66778.0", 0),
        ("", 0),
        (None, 0),
        (66778, 0),
        ([{"role": "assistant", "content": "066778"}], 0),
    ],
)
def test_sorting_reward(completion, reward):
    assert SORTING.reward("780667>", completion) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("77", 8),
        ("78", 6 * (1 - 1 / 77)),
        ("0", 0),
        ("077", 0),
        ("154", 0),
        ("999999", 0),
        ("9" * 10_000, 0),
        ("-77", 0),
        ("77.0", 0),
        ("70+7", 0),
        ("__import__('os').abort()", 0),
        ("77です。", 0),
        ("７７", 0),
        ("", 0),
        (None, 0),
    ],
)
def test_prime_sum_reward(completion, reward):
    assert PRIME_SUMS.reward("20未満の素数の合計は？", completion) == pytest.approx(reward)


@BOTH
def test_the_right_answer_has_the_highest_reward(task):
    assert {task.reward(prompt, task.answer(prompt)) for prompt in task.test_prompts} == {8.0}


@pytest.mark.parametrize("prompt", ["", "780667", "７８０６６７>", "20未満の素数の合計は?", "x>"])
@BOTH
def test_a_prompt_of_another_kind_is_refused(task, prompt):
    with pytest.raises(ValueError, match=f"prompt: not a {task.name} prompt"):
        task.answer(prompt)
    with pytest.raises(ValueError, match="prompt"):
        task.reward(prompt, "77")


@pytest.mark.parametrize("limit", ["0", "1", "2", "007", "020", "1000", "２０", "٢٠"])
def test_a_limit_without_primes_or_oddly_written_is_refused(limit):
    prompt = f"{limit}未満の素数の合計は？"
    for use in (PRIME_SUMS.answer, lambda p: PRIME_SUMS.reward(p, "2")):
        with pytest.raises(ValueError, match="prompt: not a prime-sums prompt"):
            use(prompt)
    with pytest.raises(ValueError, match="prompt: not a prime-sums prompt"):
        PRIME_SUMS.mistake(prompt, np.random.default_rng(0))


@BOTH
def test_demonstrations_are_right_as_often_as_asked(task):
    data = demonstrations(task, 3000, right=0.4, seed=1)
    assert data.column_names == ["prompt", "completion"]
    assert accuracy(task, data["prompt"][:], data["completion"][:]) == pytest.approx(0.4, abs=0.04)
    for right in (0.0, 1.0):
        data = demonstrations(task, 100, right=right, seed=1)
        assert accuracy(task, data["prompt"][:], data["completion"][:]) == right


@BOTH
@pytest.mark.parametrize("draw", [demonstrations, preferences, problems])
def test_data_follows_the_seed_and_uses_every_prompt_evenly(task, draw):
    first = draw(task, 250, seed=3)
    assert first[:] == draw(task, 250, seed=3)[:]
    assert first[:] != draw(task, 250, seed=4)[:]
    assert set(first["prompt"]) <= set(task.train_prompts)
    counts = {prompt: 0 for prompt in first["prompt"]}
    for prompt in first["prompt"]:
        counts[prompt] += 1
    assert max(counts.values()) == math.ceil(250 / len(task.train_prompts))


def test_every_round_of_prompts_has_its_own_order():
    n = len(PRIME_SUMS.train_prompts)
    prompts = demonstrations(PRIME_SUMS, 2 * n, seed=0)["prompt"][:]
    assert set(prompts[:n]) == set(prompts[n:]) == set(PRIME_SUMS.train_prompts)
    assert prompts[:n] != prompts[n:]


def test_problems_carry_their_answers():
    data = problems(PRIME_SUMS, 100, seed=0)
    assert data.column_names == ["prompt", "ground_truth"]
    answers = dict(zip(data["prompt"], data["ground_truth"], strict=True))
    assert answers["20未満の素数の合計は？"] == "77" and len(answers) == 100


def test_preferences_have_pairs_of_mistakes_with_equal_reward():
    data = preferences(SORTING, 2000, seed=0)
    ties = [
        SORTING.reward(row["prompt"], row["chosen"])
        == SORTING.reward(row["prompt"], row["rejected"])
        for row in data
    ]
    assert sum(ties) > 100


@pytest.mark.parametrize(("right", "least", "most"), [(0.9, 0.92, 1.0), (0.05, 0.0, 0.2)])
def test_preferences_have_the_answer_as_often_as_asked(right, least, most):
    data = preferences(SORTING, 2000, right=right, seed=0)
    share = np.mean(
        [SORTING.answer(row["prompt"]) in (row["chosen"], row["rejected"]) for row in data]
    )
    assert least < share < most


@BOTH
def test_preferences_follow_bradley_terry(task):
    data = preferences(task, 4000, seed=0)
    assert data.column_names == ["prompt", "chosen", "rejected"]
    margins = np.array(
        [
            task.reward(row["prompt"], row["chosen"]) - task.reward(row["prompt"], row["rejected"])
            for row in data
        ]
    )
    assert all(row["chosen"] != row["rejected"] for row in data)
    # among pairs whose rewards differ by d, the better one is chosen with probability sigmoid(d)
    gaps = np.abs(margins)
    bins = [(gaps > low) & (gaps <= low + 1) for low in (0.5, 1.5, 2.5)]
    bins = [rows for rows in bins if rows.sum() >= 300]
    assert bins
    for rows in bins:
        expected = (1 / (1 + np.exp(-gaps[rows]))).mean()
        assert (margins[rows] > 0).mean() == pytest.approx(expected, abs=0.05)


def test_out_of_range_numbers_are_refused():
    for n in (0, -1):
        with pytest.raises(ValueError, match="n: must be at least 1"):
            demonstrations(SORTING, n, seed=0)
        with pytest.raises(ValueError, match="n: must be at least 1"):
            problems(SORTING, n, seed=0)
    for right in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="right"):
            demonstrations(SORTING, 1, right=right, seed=0)
    with pytest.raises(ValueError, match="right"):  # two right answers never differ
        preferences(SORTING, 1, right=1.0, seed=0)


def test_accuracy():
    prompts = ["780667>", "210000>"]
    assert accuracy(SORTING, prompts, ["066778", "000021"]) == 0.5
    with pytest.raises(ValueError, match="completions: 1 for 2 prompts"):
        accuracy(SORTING, prompts, ["066778"])
    with pytest.raises(ValueError, match="prompts: is empty"):
        accuracy(SORTING, [], [])
