"""Our losses against other public libraries: losses and gradients in data/peers.json."""

import json
from pathlib import Path

import pytest
import torch

from companion.losses import dpo_loss, ipo_loss, reward_model_loss

PEERS = json.loads((Path(__file__).parent / "data/peers.json").read_text(encoding="utf-8"))

LOSSES = {
    "dpo": lambda chosen, rejected, reference, beta: dpo_loss(chosen, rejected, *reference, beta),
    "ipo_sum": lambda chosen, rejected, reference, beta: ipo_loss(
        chosen, rejected, *reference, beta
    ),
    "reward_model": lambda chosen, rejected, reference, beta: reward_model_loss(chosen, rejected),
}
CASES = [
    pytest.param(method, peer, case["inputs"], output, id=f"{method}-{peer}-{case['seed']}")
    for case in PEERS["cases"]
    for method in LOSSES
    for peer, output in case["outputs"][method].items()
]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("method, peer, inputs, output", CASES)
def test_our_loss_equals_other_libraries(method, peer, inputs, output):
    chosen, rejected = (tensor(inputs[key]).requires_grad_() for key in ("chosen", "rejected"))
    reference = [tensor(inputs[key]) for key in ("ref_chosen", "ref_rejected")]
    loss = LOSSES[method](chosen, rejected, reference, inputs["dpo_beta"])
    loss.backward()
    exact = dict(rtol=0, atol=1e-12)
    torch.testing.assert_close(loss.detach(), tensor(output["loss"]), **exact)
    torch.testing.assert_close(chosen.grad, tensor(output["grad_chosen"]), **exact)
    torch.testing.assert_close(rejected.grad, tensor(output["grad_rejected"]), **exact)
