"""Runs of TRL's own trainer, cut to a few steps."""

import math
from dataclasses import replace

import pytest
import torch
import transformers
from transformers import TrainerState
from trl import DPOConfig, DPOTrainer

from companion import lm, training
from companion.lm import store
from companion.tasks import SORTING, preferences
from companion.training import run


@pytest.fixture(autouse=True)
def cpu_preset(monkeypatch):
    monkeypatch.setenv("COMPANION_PRESET", "cpu")


def make_trainer(model, tokenizer, row, seed=0, **overrides):
    return DPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=DPOConfig(loss_type="sigmoid", beta=row.beta, **row.arguments(seed=seed, **overrides)),
        train_dataset=preferences(SORTING, row.examples, seed=seed),
    )


def get_watch(trainer):
    [watch] = [c for c in trainer.callback_handler.callbacks if isinstance(c, run._Watch)]
    return watch


def cut(row):
    return replace(row, steps=10, examples=160, batch_size=16)


def test_history_bar_and_silence(recwarn, capfd):
    training.quiet()
    history = training.train(make_trainer(*lm.load("sorting"), cut(training.preset("dpo"))))

    assert history["step"].tolist() == [1, 5, 10]
    assert history["loss"][0] == pytest.approx(math.log(2), abs=1e-6)
    assert history["rewards/margins"].iloc[-1] > 0
    assert {"grad_norm", "logps/chosen", "logps/rejected"} <= set(history.columns)
    assert not history.isna().any(axis=None)
    assert not [column for column in history if "runtime" in column or "second" in column]
    assert not {"epoch", "num_tokens", "step_time"} & set(history.columns)  # `step` says it

    printed = capfd.readouterr()
    assert printed.out == ""
    # one bar and nothing else
    bars = {line.split(":")[0] for line in printed.err.replace("\r", "\n").split("\n") if line}
    assert bars == {"train"}
    assert not recwarn.list


def test_the_same_seed_gives_the_same_run():
    row = cut(training.preset("dpo"))

    def run(seed):
        return training.train(make_trainer(*lm.load("sorting"), row, seed=seed))

    first = run(1)
    assert first.equals(run(1))
    assert not first.equals(run(2))


def test_a_second_run_has_its_own_history():
    trainer = make_trainer(*lm.load("sorting"), cut(training.preset("dpo")))
    assert training.train(trainer)["step"].tolist() == [1, 5, 10]
    first = get_watch(trainer)
    transformers.utils.logging.set_verbosity_warning()
    assert training.train(trainer)["step"].tolist() == [1, 5, 10]
    assert get_watch(trainer) is not first  # and there is one
    assert first.bar.disable and get_watch(trainer).bar.disable  # as closed bars are
    assert transformers.utils.logging.get_verbosity() == transformers.utils.logging.ERROR


@pytest.mark.parametrize("overrides", [dict(logging_steps=11), dict(logging_strategy="no")])
def test_a_run_that_would_log_nothing_is_refused_before_it_starts(overrides):
    model, tokenizer = lm.load("sorting")
    row = cut(training.preset("dpo"))
    trainer = make_trainer(model, tokenizer, row, logging_first_step=False, **overrides)
    before = model.lm_head.weight.clone()
    with pytest.raises(ValueError, match="logging_steps: no row .* in 10 steps"):
        training.train(trainer)
    assert torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (dict(logging_steps=10), [10]),
        (dict(logging_steps=0.5), [5, 10]),  # a share of the run
        (dict(logging_strategy="epoch"), [10]),
        (dict(logging_steps=11, logging_first_step=True), [1]),
    ],
)
def test_a_run_that_logs_now_and_then(overrides, steps):
    row = cut(training.preset("dpo"))
    overrides = dict(logging_first_step=False) | overrides
    trainer = make_trainer(*lm.load("sorting"), row, **overrides)
    assert training.train(trainer)["step"].tolist() == steps


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_figures_that_are_no_numbers_stop_the_run(name, value):
    state = TrainerState(global_step=3, max_steps=10)
    with pytest.raises(FloatingPointError, match=f"{name} is {value} at step 3 of 10"):
        run._Watch().on_log(None, state, None, logs={name: value})


def test_nan_stops_the_run():
    model, tokenizer = lm.load("sorting")
    trainer = make_trainer(model, tokenizer, cut(training.preset("dpo")))
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="loss is nan at step 1 of 10"):
        training.train(trainer)
    assert get_watch(trainer).bar.disable  # closed


def test_nan_shows_through_trainers_own_filter():
    """With TRL's default the loss is replaced by an average, the gradient norm is not."""
    model, tokenizer = lm.load("sorting")
    row = cut(training.preset("dpo"))
    trainer = make_trainer(model, tokenizer, row, logging_nan_inf_filter=True)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="is nan at step"):
        training.train(trainer)


def test_gpu_preset_forced_on_the_cpu(tmp_path, monkeypatch):
    """The gpu preset's whole path, its model made on first use; only the sizes are cut."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COMPANION_PRESET", "gpu")
    monkeypatch.setenv("COMPANION_CACHE", str(tmp_path))
    recipe = replace(store.RECIPES["sorting", "small"], steps=2, batch_size=8)
    monkeypatch.setitem(store.RECIPES, ("sorting", "small"), recipe)
    row = training.preset("dpo")
    assert row.size == "small"
    model, tokenizer = lm.load("sorting", row.size)
    assert model.config.hidden_size == 256 and model.config.num_hidden_layers == 4
    trainer = make_trainer(model, tokenizer, replace(row, steps=2, examples=32, batch_size=8))
    history = training.train(trainer)
    assert history["loss"][0] == pytest.approx(math.log(2), abs=1e-6)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
