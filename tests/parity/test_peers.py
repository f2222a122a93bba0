"""Our losses against other public libraries: losses and gradients in data/peers.json."""

import json
from pathlib import Path

import pytest
import torch

from companion.losses import (
    dapo_loss,
    dpo_loss,
    dr_grpo_loss,
    gae,
    group_advantages,
    grpo_loss,
    gspo_loss,
    ipo_loss,
    ppo_policy_loss,
    reward_model_loss,
    whiten,
)

PEERS = json.loads((Path(__file__).parent / "data/peers.json").read_text(encoding="utf-8"))

LOSSES = {
    "dpo": lambda chosen, rejected, reference, beta: dpo_loss(chosen, rejected, *reference, beta),
    "ipo_sum": lambda chosen, rejected, reference, beta: ipo_loss(
        chosen, rejected, *reference, beta
    ),
    "reward_model": lambda chosen, rejected, reference, beta: reward_model_loss(chosen, rejected),
}
# The GRPO family: (scale of the advantages, their name in the file, loss)
GROUP_LOSSES = {
    "grpo": ("group", "advantages_group_std", lambda logps, old, ref, a, mask, inputs: grpo_loss(
        logps, old, a, mask, inputs["epsilon"], ref, inputs["beta"])),
    "dr_grpo": ("none", "advantages_centred", lambda logps, old, ref, a, mask, inputs: dr_grpo_loss(
        logps, old, a, mask, inputs["epsilon"], inputs["max_completion_length"])),
    "dapo": ("group", "advantages_group_std", lambda logps, old, ref, a, mask, inputs: dapo_loss(
        logps, old, a, mask, inputs["epsilon_low"], inputs["epsilon_high"])),
    "gspo": ("group", "advantages_group_std", lambda logps, old, ref, a, mask, inputs: gspo_loss(
        logps, old, a, mask, inputs["gspo_epsilon"])),
}  # fmt: skip


def cases_of(methods):
    return [
        pytest.param(method, peer, case["inputs"], output, id=f"{method}-{peer}-{case['seed']}")
        for case in PEERS["cases"]
        for method in methods
        for peer, output in case["outputs"][method].items()
    ]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("method, peer, inputs, output", cases_of(LOSSES))
def test_our_loss_equals_other_libraries(method, peer, inputs, output):
    chosen, rejected = (tensor(inputs[key]).requires_grad_() for key in ("chosen", "rejected"))
    reference = [tensor(inputs[key]) for key in ("ref_chosen", "ref_rejected")]
    loss = LOSSES[method](chosen, rejected, reference, inputs["dpo_beta"])
    loss.backward()
    exact = dict(rtol=0, atol=1e-12)
    torch.testing.assert_close(loss.detach(), tensor(output["loss"]), **exact)
    torch.testing.assert_close(chosen.grad, tensor(output["grad_chosen"]), **exact)
    torch.testing.assert_close(rejected.grad, tensor(output["grad_rejected"]), **exact)


@pytest.mark.parametrize("method, peer, inputs, output", cases_of(GROUP_LOSSES))
def test_our_group_loss_equals_other_libraries(method, peer, inputs, output):
    scale, given, loss_of = GROUP_LOSSES[method]
    logps = tensor(inputs["logps"]).requires_grad_()
    old, ref, mask = (tensor(inputs[key]) for key in ("old_logps", "ref_logps", "mask"))
    advantages = group_advantages(tensor(inputs["rewards"]), inputs["group_size"], scale)
    exact = dict(rtol=0, atol=1e-12)
    torch.testing.assert_close(advantages, tensor(inputs[given]), **exact)
    if method in ("grpo", "gspo"):
        # They divide a response by its length + 1e-8, TRL and we by its length.
        rows = [
            loss_of(*(x[[i]] for x in (logps, old, ref, advantages, mask)), inputs)
            for i in range(len(logps))
        ]
        lengths = mask.sum(-1)
        loss = (torch.stack(rows) * lengths / (lengths + 1e-8)).mean()
        whole = loss_of(logps, old, ref, advantages, mask, inputs)
        torch.testing.assert_close(whole, torch.stack(rows).mean(), **exact)
    else:
        loss = loss_of(logps, old, ref, advantages, mask, inputs)
    loss.backward()
    torch.testing.assert_close(loss.detach(), tensor(output["loss"]), **exact)
    torch.testing.assert_close(logps.grad, tensor(output["grad"]), **exact)


@pytest.mark.parametrize("method, peer, inputs, output", cases_of(["ppo_policy"]))
def test_our_policy_loss_equals_other_libraries(method, peer, inputs, output):
    logps = tensor(inputs["logps"]).requires_grad_()
    old, mask, advantages = (
        tensor(inputs[key]) for key in ("old_logps", "mask", "advantages_group_std")
    )
    advantages = advantages[:, None].expand_as(mask)
    loss = ppo_policy_loss(logps, old, advantages, mask, inputs["epsilon"])
    loss.backward()
    exact = dict(rtol=0, atol=1e-12)
    torch.testing.assert_close(loss.detach(), tensor(output["loss"]), **exact)
    torch.testing.assert_close(logps.grad, tensor(output["grad"]), **exact)


@pytest.mark.parametrize("method, peer, inputs, output", cases_of(["gae_whitened"]))
def test_our_advantages_equal_other_libraries(method, peer, inputs, output):
    mask = tensor(inputs["mask"])
    rewards, values = tensor(inputs["token_rewards"]), tensor(inputs["values"])
    advantages, returns = gae(rewards, values, mask, inputs["gamma"], inputs["lam"])
    exact = dict(rtol=0, atol=1e-12)
    torch.testing.assert_close(returns, tensor(output["ret"]) * mask, **exact)
    # They divide sums by the count + 1e-8: the mean, and the variance about it.
    count = mask.sum()
    mean = advantages.sum() / (count + 1e-8)
    variance = (((advantages - mean) ** 2) * mask).sum() / (count + 1e-8) * count / (count - 1)
    theirs = (advantages - mean) * torch.rsqrt(variance + 1e-8) * mask
    torch.testing.assert_close(theirs, tensor(output["adv"]) * mask, **exact)
    torch.testing.assert_close(whiten(advantages, mask), theirs, rtol=0, atol=1e-8)
