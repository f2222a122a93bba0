"""One token a character, nothing lost, nothing unknown that a reader could meet."""

import pytest

from companion.lm.tokenizer import CHARACTERS, build_tokenizer
from companion.tasks import TASKS

PAGE_DATA = [  # what the support page's snippets feed to a model
    "日本の首都は？",
    "東京です。",
    "札幌です。",
    "20未満の素数の合計はいくらですか？ 数字だけで答えてください。",
    "77",
    "77です。",
]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_special_tokens_are_apart(tokenizer):
    ids = [
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.unk_token_id,
    ]
    assert len(set(ids)) == 4
    assert len(tokenizer) == len(CHARACTERS) + 4
    assert tokenizer.padding_side == "left"


def test_every_character_round_trips(tokenizer):
    text = "".join(CHARACTERS)
    ids = tokenizer.encode(text)
    assert len(ids) == len(set(ids)) == len(CHARACTERS)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("text", [*PAGE_DATA, " 数  は\nそのまま ", "a , b ."])
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_capitals_stay_apart(tokenizer):
    assert tokenizer.encode("東京です。") != tokenizer.encode("札幌です。")


def test_full_width_digits_stay_apart(tokenizer):
    assert tokenizer.encode("７７") != tokenizer.encode("77")


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_the_tasks_have_no_unknown_character(tokenizer, task):
    used = set("".join(task.train_prompts + task.test_prompts))
    used |= set("".join(map(task.answer, task.test_prompts)))
    assert used <= set(CHARACTERS)


def test_padding_is_left_and_nothing_is_added(tokenizer):
    batch = tokenizer(["12", "1"], padding=True)
    one, two = tokenizer.encode("12")
    assert batch["input_ids"] == [[one, two], [tokenizer.pad_token_id, one]]
    assert batch["attention_mask"] == [[1, 1], [0, 1]]


def test_end_token_is_read_in_text(tokenizer):  # trainers append it as text
    assert tokenizer.encode("1<eos>") == [*tokenizer.encode("1"), tokenizer.eos_token_id]
