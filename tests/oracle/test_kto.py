"""companion.oracle.kto: TRL's collator, the mismatched pairs."""

import pytest

from companion.oracle import unpaired_batch


def test_responses_are_rotated_by_one_not_reversed():
    batch = unpaired_batch(
        [[5], [6], [7]], [[11, 1], [12, 1], [13, 1]], [True, False, True], pad_token_id=0
    )
    assert batch["input_ids"].tolist() == [[5, 11, 1], [6, 12, 1], [7, 13, 1]]
    # reversed, the middle prompt would meet its own response
    assert batch["KL_input_ids"].tolist() == [[5, 13, 1], [6, 11, 1], [7, 12, 1]]
    assert batch["label"].tolist() == [True, False, True]


@pytest.mark.parametrize(
    "columns, message",
    [
        (([[5]], [[6]], [True]), "prompts needs at least 2 rows"),
        (([[5], [6]], [[6]], [True, True]), "completions must have 2 rows like prompts, got 1"),
        (([[5], [6]], [[6], []], [True, True]), r"completions\[1\] is empty"),
        (([[5], [6]], [[6], [7]], [True]), "desirable must have 2 rows like prompts, got 1"),
        (([], [], []), "prompts is empty"),
    ],
)
def test_bad_batches_are_named(columns, message):
    with pytest.raises(ValueError, match=message):
        unpaired_batch(*columns, pad_token_id=0)
