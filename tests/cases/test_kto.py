"""Inputs that broke other implementations of KTO, with their right values."""

import copy
import logging

import pytest
import torch
from datasets import Dataset
from trl import KTOConfig, KTOTrainer

from companion.lm import build_tokenizer, checkpoint, load, sequence_log_probs
from companion.losses import kto_loss, kto_reference_point
from companion.oracle import trl_kto, unpaired_batch
from companion.training import train


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def row(prompt, completion="77", label=True):
    return {"prompt": prompt, "completion": completion, "label": label}


ROWS = [row("1+", "7", True), row("2+", "78", False), row("3+", "9", True), row("4+", "12", False)]


def trainer(tmp_path, rows, model=None, ref_model=None, **config):
    arguments = dict(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False,
        report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1, max_steps=1,
        learning_rate=0.0, beta=0.5,
    )  # fmt: skip
    return KTOTrainer(
        model=model or str(checkpoint("prime-sums")),
        ref_model=ref_model,
        args=KTOConfig(**(arguments | config)),
        processing_class=load("prime-sums")[1],
        train_dataset=Dataset.from_list(rows),
    )


@pytest.fixture
def models():
    """A policy and its reference, in float64, that differ a little."""
    model, ref_model = (load("prime-sums", dtype=torch.float64)[0] for _ in range(2))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.randn(p.shape, generator=g, dtype=p.dtype)
    return model, ref_model


def batch_of(rows):
    tokenizer = build_tokenizer()
    ids = [tokenizer([r["prompt"] for r in rows])["input_ids"]]
    ids += [tokenizer([r["completion"] + tokenizer.eos_token for r in rows])["input_ids"]]
    labels = [r["label"] for r in rows]
    return unpaired_batch(*ids, labels, pad_token_id=tokenizer.pad_token_id)


def log_ratios(models, batch, prefix=""):
    names = ("input_ids", "attention_mask", "completion_mask")
    with torch.no_grad():
        policy, reference = (
            sequence_log_probs(lm, **{n: batch[prefix + n] for n in names}) for lm in models
        )
    return policy - reference


def loss_of(models, rows, point=None):
    batch = batch_of(rows)
    h, mismatched = log_ratios(models, batch), log_ratios(models, batch, "KL_")
    if point is None:
        point = kto_reference_point(mismatched, torch.zeros_like(mismatched))
    return kto_loss(h, torch.zeros_like(h), batch["label"], point, 0.5).item()


# The reference point: clamp, no gradient.


@pytest.mark.parametrize(
    "raw, desirable, expected",
    [(-3.0, True, 0.450166), (-3.0, False, 0.549834), (0.0, False, 0.549834),
     (1.0, True, 0.475021), (1.0, False, 0.524979)],
)  # fmt: skip
def test_a_negative_mean_is_clamped(raw, desirable, expected):
    point = kto_reference_point(t(raw - 1, raw + 1), t(0.0, 0.0))
    loss = kto_loss(t(2.0), t(0.0), torch.tensor([desirable]), point, 0.1)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_no_gradient_flows_through_the_reference_point():
    mismatched = t(3.0, 1.0).requires_grad_()
    point = kto_reference_point(mismatched, t(0.0, 0.0))
    logps = t(0.5).requires_grad_()
    kto_loss(logps, t(0.0), torch.tensor([True]), point, 0.1).backward()
    assert point.item() == 2.0 and mismatched.grad is None and logps.grad.item() < 0


def test_at_the_reference_the_loss_is_a_half(tmp_path):
    history = train(trainer(tmp_path, ROWS, per_device_train_batch_size=4))
    assert history["loss"][0] == pytest.approx(0.5, abs=1e-6)
    assert history["grad_norm"][0] > 0.01


# The mismatch: rotated by one, inside one step's batch.


@pytest.mark.parametrize("size", [2, 3, 4])
def test_trl_rotates_by_one_and_so_does_our_batch(tmp_path, size):
    rows = ROWS[:size]
    ours = batch_of(rows)
    theirs = trainer(tmp_path, rows, per_device_train_batch_size=size)
    collated = theirs.data_collator(list(theirs.train_dataset))
    for name in ("KL_input_ids", "KL_completion_mask", "input_ids", "label"):
        assert torch.equal(ours[name], collated[name])
    own = [example["completion_ids"] for example in theirs.train_dataset]
    others = [example["KL_completion_ids"] for example in theirs.train_dataset]
    assert others == [own[-1], *own[:-1]]
    assert all(a != b for a, b in zip(own, others, strict=True))  # a reversed one keeps the middle


@pytest.mark.bad_input
def test_one_row_has_no_mismatch(tmp_path):
    with pytest.raises(ValueError, match="at least 2 rows"):
        kto_reference_point(t(1.0), t(0.0))
    with pytest.raises(ValueError, match="at least 2 rows"):
        batch_of(ROWS[:1])
    with pytest.raises(ValueError, match="batch size must be > 1"):
        trainer(tmp_path, ROWS, per_device_train_batch_size=1)


def test_the_reference_point_is_of_a_step_batch_not_of_the_accumulated_one(tmp_path, models):
    model, ref_model = models
    both = ref_model, model  # this way round the means of the mismatched pairs are not all below 0
    expected = {
        (4, 1): loss_of(both, ROWS),
        (2, 2): (loss_of(both, ROWS[:2]) + loss_of(both, ROWS[2:])) / 2,
    }
    assert abs(expected[4, 1] - expected[2, 2]) > 1e-4
    for (size, accumulation), value in expected.items():
        run = trainer(
            tmp_path, ROWS, *map(copy.deepcopy, both), per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
        )  # fmt: skip
        assert train(run)["loss"][0] == pytest.approx(value, abs=1e-5)


def test_a_single_row_left_over_is_its_own_mismatch(tmp_path, models):
    # max(0, h) is subtracted from h: exactly a half where h > 0, whatever the label
    for both in (models, models[::-1]):
        h = log_ratios(both, batch_of([ROWS[1], ROWS[1]]))[0].item()
        run = trainer(
            tmp_path, [*ROWS, ROWS[1]], *map(copy.deepcopy, both),
            per_device_train_batch_size=4, max_steps=2,
        )  # fmt: skip
        last = train(run).iloc[1]
        value = kto_loss(t(h), t(0.0), torch.tensor([False]), t(max(0.0, h))[0], 0.5).item()
        assert last["kl"] == pytest.approx(max(0.0, h), abs=1e-5)
        assert last["loss"] == pytest.approx(value, abs=1e-5)
        assert (abs(last["loss"] - 0.5) < 1e-5) == (h > 0)


# Labels and order.


@pytest.mark.parametrize("label", [True, False])
def test_a_batch_of_one_label_equals_trl(models, label):
    rows = [r | {"label": label} for r in ROWS]
    theirs = trl_kto(*models, batch_of(rows), build_tokenizer(), beta=0.5)
    assert loss_of(models, rows) == pytest.approx(theirs.loss.item(), abs=1e-6)
    assert max(g.abs().max().item() for g in theirs.gradients.values()) > 0


def test_trl_refuses_to_shuffle(tmp_path):
    defaults = KTOConfig(str(tmp_path), use_cpu=True, bf16=False)
    assert defaults.train_sampling_strategy == "sequential"
    with pytest.raises(ValueError, match="sequential"):
        trainer(tmp_path, ROWS, train_sampling_strategy="random")


def test_imbalance_is_warned_of_with_the_weights_that_even_it_out(tmp_path, monkeypatch):
    heard = []
    listener = logging.Handler()
    listener.emit = lambda record: heard.append(record.getMessage())
    logger = logging.getLogger("trl.trainer.kto_trainer")
    monkeypatch.setattr(logger, "handlers", [listener])
    three_to_one = [r | {"label": i == 0} for i, r in enumerate(ROWS)]
    trainer(tmp_path, three_to_one)
    assert "[3.0, 3.99]" in " ".join(heard)
    heard.clear()
    trainer(tmp_path, three_to_one, desirable_weight=3.0)
    assert not any("desirable_weight in" in text for text in heard)


def test_the_other_loss_is_kto_with_the_reference_point_at_0(models):
    theirs = trl_kto(
        *models, batch_of(ROWS), build_tokenizer(), beta=0.5, loss_type="apo_zero_unpaired"
    )
    assert loss_of(models, ROWS, t(0.0)[0]) == pytest.approx(theirs.loss.item(), abs=1e-6)
