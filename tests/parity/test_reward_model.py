"""reward_model_loss against TRL's RewardTrainer: value, parameter gradients."""

import pytest
import torch
from transformers import Qwen2ForSequenceClassification

from companion.lm import new_model
from companion.losses import reward_model_loss
from companion.oracle import preference_batch, trl_reward_model


@pytest.fixture
def random_reward_model(dtype):
    def make(seed: int):
        config = new_model().config
        config.num_labels = 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen2ForSequenceClassification(config)
        return model.to(dtype).eval()

    return make


@pytest.mark.parametrize("seed", range(3))
def test_our_loss_equals_trl(seed, random_ids, random_reward_model, tokenizer, assert_parity):
    batch = preference_batch(*random_ids(seed), pad_token_id=tokenizer.pad_token_id)
    model = random_reward_model(seed)
    theirs = trl_reward_model(model, batch, tokenizer)

    scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert scores.shape == (12, 1)  # one reward a row, never vocabulary logits
    chosen, rejected = scores.squeeze(-1).chunk(2)
    assert (chosen - rejected).min() < -0.1 and (chosen - rejected).max() > 0.1
    loss = reward_model_loss(chosen, rejected)
    loss.backward()
    # no log-probs in it: exact in every release
    assert_parity("RM", model, loss, theirs, fp32_release=False)
