"""Cases of IPO in the language of its users: small inputs with known right values."""

import pytest
import torch

from companion.lm import completion_batch, load, sequence_log_probs
from companion.losses import ipo_loss
from companion.oracle import preference_batch, trl_dpo

BETA = 0.1


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


# A20: log-ratios 4 over 4 tokens and −2 over 2.


def test_the_sum_is_the_papers_and_the_token_mean_trls():
    policy, zeros = (t(4.0), t(-2.0)), (t(0.0), t(0.0))
    lengths = torch.tensor([4]), torch.tensor([2])
    assert ipo_loss(*policy, *zeros, BETA).item() == pytest.approx(1.0, abs=1e-12)
    assert ipo_loss(*policy, *zeros, BETA, *lengths).item() == pytest.approx(9.0, abs=1e-12)


@pytest.mark.parametrize("lengths", [(), (torch.tensor([4]), torch.tensor([2]))])
def test_policy_equal_to_the_reference_costs_the_squared_target(lengths):
    logps = t(-9.0).requires_grad_()
    loss = ipo_loss(logps, t(-15.0), t(-9.0), t(-15.0), BETA, *lengths)
    (slope,) = torch.autograd.grad(loss, logps)
    assert loss.item() == pytest.approx(25.0, abs=1e-12)
    tokens = lengths[0].item() if lengths else 1
    assert slope.item() == pytest.approx(-1 / BETA / tokens, abs=1e-12)


# A19, for IPO: the same text on both sides.


def test_equal_texts_teach_nothing():
    model, tokenizer = load("prime-sums", dtype=torch.float64)
    rows = completion_batch(tokenizer, ["20未満の素数の合計は？"] * 2, ["77"] * 2)
    chosen, rejected = sequence_log_probs(model, **rows).chunk(2)
    reference = t(-1.0)
    loss = ipo_loss(chosen, rejected, reference, reference, BETA)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert loss.item() == pytest.approx(25.0, abs=1e-12)
    assert max(gradient.abs().max().item() for gradient in gradients) < 1e-10


def test_the_pull_turns_round_at_the_target():
    zero = t(0.0)
    for gap, sign in ((4.9, -1), (5.1, 1)):
        chosen = t(gap).requires_grad_()
        ipo_loss(chosen, zero, zero, zero, BETA).backward()
        assert chosen.grad.item() * sign > 0


# What TRL does with the settings that the equation does not have.


@pytest.fixture(scope="module")
def ask_trl():
    model, tokenizer = load("prime-sums", dtype=torch.float64)
    reference, _ = load("prime-sums", dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=g, dtype=parameter.dtype)
    prompt, long, short = tokenizer(["20未満の素数の合計は？", "1160", "7"])["input_ids"]
    eos = tokenizer.eos_token_id
    batch = preference_batch(
        [prompt], [[*long, eos]], [[*short, eos]], pad_token_id=tokenizer.pad_token_id
    )

    def ask(policy=model, **config):
        return trl_dpo(
            policy, reference, batch, tokenizer, loss_type="ipo", beta=BETA, **config
        ).loss.item()

    logps = sequence_log_probs(model, **batch).detach().chunk(2)
    ref_logps = sequence_log_probs(reference, **batch).detach().chunk(2)
    lengths = batch["completion_mask"].sum(-1).chunk(2)
    return ask, reference, (*logps, *ref_logps), lengths


def test_trl_divides_by_the_length_with_its_eos(ask_trl):
    ask, _, logps, lengths = ask_trl
    assert [n.item() for n in lengths] == [5, 2]
    theirs = ask()
    assert ipo_loss(*logps, BETA, *lengths).item() == pytest.approx(theirs, abs=1e-5)
    without_eos = ipo_loss(*logps, BETA, *(n - 1 for n in lengths)).item()
    assert abs(without_eos - theirs) > 1e-2
    assert abs(ipo_loss(*logps, BETA).item() - theirs) > 1e-2


def test_trl_starts_at_the_squared_target(ask_trl):
    ask, reference, _, _ = ask_trl
    assert ask(reference) == pytest.approx(25.0, abs=1e-5)


def test_trl_ignores_label_smoothing_and_heeds_the_divergence(ask_trl):
    ask, *_ = ask_trl
    assert ask(label_smoothing=0.3) == ask()
    assert abs(ask(f_divergence_type="forward_kl") - ask()) > 1e-3
