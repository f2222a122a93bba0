"""kto_loss and kto_reference_point against TRL's KTOTrainer: value, parameter gradients."""

import pytest
import torch

from companion.lm import sequence_log_probs
from companion.losses import kto_loss, kto_reference_point
from companion.oracle import trl_kto, unpaired_batch

LABELS = {
    "mixed": [True, False, False, True, False, True],
    "desirable": [True] * 6,
    "undesirable": [False] * 6,
}

CLAMP_OPEN = {0: False, 1: True, 2: True}  # whether the raw mean of the mismatched pairs is above 0


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("seed", range(3))
def test_our_loss_equals_trl(seed, labels, random_ids, random_model, tokenizer, assert_parity):
    desirable = LABELS[labels]
    prompts, completions = random_ids(seed, responses=1)
    batch = unpaired_batch(prompts, completions, desirable, pad_token_id=tokenizer.pad_token_id)
    model, ref_model = (random_model(2 * seed + k, 2.0) for k in (0, 1))
    weights = dict(desirable_weight=1.5, undesirable_weight=0.5)
    theirs = trl_kto(model, ref_model, batch, tokenizer, beta=0.3, **weights)

    names = ("input_ids", "attention_mask", "completion_mask")
    logps = sequence_log_probs(model, **{name: batch[name] for name in names})
    with torch.no_grad():
        ref_logps = sequence_log_probs(ref_model, **{name: batch[name] for name in names})
        mismatched, ref_mismatched = (
            sequence_log_probs(lm, **{name: batch[f"KL_{name}"] for name in names})
            for lm in (model, ref_model)
        )
    raw = (mismatched - ref_mismatched).mean().item()
    assert (raw > 0) == CLAMP_OPEN[seed], "the seeds must stand on both sides of the clamp"
    point = kto_reference_point(mismatched, ref_mismatched)
    torch.testing.assert_close(
        point.double().item(), theirs.metrics["kl"], rtol=1e-5, atol=1e-5
    )
    loss = kto_loss(logps, ref_logps, torch.tensor(desirable), point, 0.3, 1.5, 0.5)
    loss.backward()
    assert_parity("KTO", model, loss, theirs)
