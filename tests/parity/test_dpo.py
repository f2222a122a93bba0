"""dpo_loss against TRL's DPOTrainer (value, parameter gradients) and against other libraries.

Runs under every supported TRL release: tools/matrix.py swaps TRL alone.
"""

import json
from pathlib import Path

import pytest
import torch
import trl
from packaging.version import Version

from companion.lm import build_tokenizer, new_model
from companion.lm.log_probs import sequence_log_probs
from companion.losses import dpo_loss
from companion.oracle import preference_batch, trl_dpo

# From 1.15 on TRL computes log-probs in float32 whatever the model's dtype.
FP32_LOG_PROBS = Version(trl.__version__) >= Version("1.15")
PEERS = json.loads((Path(__file__).parent / "data/peers.json").read_text(encoding="utf-8"))


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    exact = dtype == torch.float64 and not FP32_LOG_PROBS
    return dict(rtol=0, atol=1e-12) if exact else dict(rtol=1e-6, atol=1e-6)


def random_pairs(seed: int, tokenizer, pairs: int = 6):
    """Prompts and completions of unequal lengths, EOS at the end."""
    g = torch.Generator().manual_seed(seed)

    def ids(low, high):
        length = int(torch.randint(low, high, (), generator=g))
        return torch.randint(4, len(tokenizer), (length,), generator=g).tolist()

    prompts = [ids(1, 7) for _ in range(pairs)]
    chosen, rejected = (
        [ids(0, 9) + [tokenizer.eos_token_id] for _ in range(pairs)] for _ in range(2)
    )
    return preference_batch(prompts, chosen, rejected, pad_token_id=tokenizer.pad_token_id)


def sharp_model(seed: int, dtype: torch.dtype):
    """A random model whose weights are large enough for log-ratios of several nats.

    Larger weights or β would make gradients of size 10 and more, of which float32 has no sixth
    decimal place to compare.
    """
    model = new_model(seed=seed, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 2
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("beta", [0.1, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_dpo_equals_trl(seed, dtype, beta, record_property):
    tokenizer = build_tokenizer()
    batch = random_pairs(seed, tokenizer)
    model, ref_model = sharp_model(2 * seed, dtype), sharp_model(2 * seed + 1, dtype)
    theirs = trl_dpo(model, ref_model, batch, tokenizer, loss_type="sigmoid", beta=beta)

    chosen, rejected = sequence_log_probs(model, **batch).chunk(2)
    with torch.no_grad():
        ref_chosen, ref_rejected = sequence_log_probs(ref_model, **batch).chunk(2)
    margins = (chosen - ref_chosen) - (rejected - ref_rejected)
    assert margins.min() < -0.5 and margins.max() > 0.5, "the batch must have both signs"
    ours = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta)
    ours.backward()

    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert gradients.keys() == theirs.gradients.keys()
    record_property("DPO loss", (ours - theirs.loss).abs().item())
    record_property(
        "DPO gradient",
        max((g - theirs.gradients[name]).abs().max().item() for name, g in gradients.items()),
    )
    torch.testing.assert_close(ours.detach(), theirs.loss, check_dtype=False, **tolerance(dtype))
    torch.testing.assert_close(
        gradients, theirs.gradients, check_dtype=False, **tolerance(dtype)
    )


@pytest.mark.parametrize("case", PEERS["cases"], ids=lambda case: f"seed {case['seed']}")
@pytest.mark.parametrize("peer", ["eric-mitchell", "openrlhf"])
def test_dpo_equals_other_libraries(case, peer):
    inputs, output = case["inputs"], case["outputs"]["dpo"][peer]

    def tensor(values):
        return torch.tensor(values, dtype=torch.float64)

    chosen, rejected = (tensor(inputs[k]).requires_grad_() for k in ("chosen", "rejected"))
    ref = (tensor(inputs[k]) for k in ("ref_chosen", "ref_rejected"))
    loss = dpo_loss(chosen, rejected, *ref, inputs["dpo_beta"])
    loss.backward()
    exact = dict(rtol=0, atol=1e-12)
    torch.testing.assert_close(loss.detach(), tensor(output["loss"]), **exact)
    torch.testing.assert_close(chosen.grad, tensor(output["grad_chosen"]), **exact)
    torch.testing.assert_close(rejected.grad, tensor(output["grad_rejected"]), **exact)
