"""dpo_loss and ipo_loss against TRL's DPOTrainer: value, parameter gradients.

Runs under every supported TRL release: tools/matrix.py swaps TRL alone.
"""

import pytest
import torch

from companion.lm import sequence_log_probs
from companion.losses import dpo_loss, ipo_loss
from companion.oracle import preference_batch, trl_dpo


# The squared loss's gradient grows with the log-ratios and 1/β, the sigmoid's with β. These keep
# it of size 1, where float32 has a sixth decimal place to compare.
@pytest.mark.parametrize(
    "method, beta, factor",
    [("DPO", 0.1, 2.0), ("DPO", 0.3, 2.0), ("IPO", 1.0, 0.5), ("IPO", 3.0, 0.5)],
)
@pytest.mark.parametrize("seed", range(3))
def test_our_loss_equals_trl(
    method, beta, factor, seed, random_ids, random_model, tokenizer, assert_parity
):
    batch = preference_batch(*random_ids(seed), pad_token_id=tokenizer.pad_token_id)
    model, ref_model = (random_model(2 * seed + k, factor) for k in (0, 1))
    loss_type = {"DPO": "sigmoid", "IPO": "ipo"}[method]
    theirs = trl_dpo(model, ref_model, batch, tokenizer, loss_type=loss_type, beta=beta)

    chosen, rejected = sequence_log_probs(model, **batch).chunk(2)
    with torch.no_grad():
        ref_chosen, ref_rejected = sequence_log_probs(ref_model, **batch).chunk(2)
    margins = (chosen - ref_chosen) - (rejected - ref_rejected)
    assert margins.min() < -0.1 and margins.max() > 0.1, "the batch must have both signs"
    if method == "DPO":
        loss = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta)
    else:
        lengths = batch["completion_mask"].sum(-1).chunk(2)
        loss = ipo_loss(chosen, rejected, ref_chosen, ref_rejected, beta, *lengths)
    loss.backward()
    assert_parity(method, model, loss, theirs)
