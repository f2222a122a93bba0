"""The shipped checkpoints keep the card's promise; cached ones are whole or made anew."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from companion import lm
from companion.lm import store
from companion.tasks import TASKS

NAMES = pytest.mark.parametrize("name", TASKS)
ROOT = Path(__file__).parents[2]


def read_card(folder):
    return json.loads((folder / store.CARD).read_text(encoding="utf-8"))


@NAMES
def test_shipped_files_are_those_of_the_card(name):
    folder = lm.checkpoint(name)
    card = read_card(folder)
    assert store.is_whole(folder)
    assert card["recipe"] == store.asdict(store.RECIPES[name, "tiny"])
    assert {path.name for path in folder.iterdir()} == {store.CARD, *card["sha256"]}
    assert not list(folder.glob("*.bin"))
    for path in folder.glob("*.json"):
        absolute_path = re.search(r'"(/|[A-Za-z]:\\\\)\w', path.read_text(encoding="utf-8"))
        assert absolute_path is None


@NAMES
def test_shipped_figures(name):
    model, tokenizer = lm.load(name)
    task = TASKS[name]
    card = read_card(lm.checkpoint(name))
    assert model.num_parameters() == card["parameters"]
    for split, prompts in [("train", task.train_prompts), ("test", task.test_prompts)]:
        measured = lm.measure(model, tokenizer, task, prompts[:500])
        assert measured == pytest.approx(card["figures"][split], abs=0.02)
    assert card["figures"]["test"]["greedy"] >= 0.97
    assert 0.38 <= card["figures"]["test"]["sampled"] <= 0.48


@NAMES
def test_a_fresh_warm_up_reaches_the_figures(name, tmp_path, monkeypatch):
    """From another seed: the card's figures are no stroke of luck."""
    promised = read_card(lm.checkpoint(name))["figures"]["test"]
    recipe = replace(store.RECIPES[name, "tiny"], seed=1)
    monkeypatch.setitem(store.RECIPES, (name, "tiny"), recipe)
    made = store.make_checkpoint(TASKS[name], "tiny", tmp_path, progress=False)
    assert made["figures"]["test"]["greedy"] >= promised["greedy"] - 0.04
    assert made["figures"]["test"]["sampled"] == pytest.approx(promised["sampled"], abs=0.08)


@NAMES
def test_readme_names_the_figures(name):
    text = (store.SHIPPED / "README.md").read_text(encoding="utf-8")
    figures = read_card(store.SHIPPED / name)["figures"]["test"]
    row = f"| {figures['greedy']:.3f} | {figures['sampled']:.3f} |"
    assert any(line.startswith(f"| {name} |") and line.endswith(row) for line in text.splitlines())


def test_load():
    model, tokenizer = lm.load("sorting", dtype=torch.float64)
    assert model.dtype == torch.float64 and not model.training
    assert tokenizer.get_vocab() == lm.build_tokenizer().get_vocab()
    assert tokenizer.padding_side == "left"
    text = "日本の首都は？ 東京です。"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


@pytest.fixture
def cut_small(tmp_path, monkeypatch):
    """A cache of its own, and a small size that takes no time."""
    monkeypatch.setenv("COMPANION_CACHE", str(tmp_path / "cache"))
    recipe = replace(store.RECIPES["prime-sums", "small"], steps=2, batch_size=8)
    monkeypatch.setitem(store.RECIPES, ("prime-sums", "small"), recipe)
    monkeypatch.setitem(store.SIZES, "small", store.SIZES["tiny"])
    monkeypatch.setattr(store, "measure", lambda *_, **__: {})  # most of the time


def test_small_is_made_once(cut_small, tmp_path, capfd, monkeypatch):
    folder = lm.checkpoint("prime-sums", "small")
    assert "warm-up" in capfd.readouterr().err  # progress
    assert store.is_whole(folder)
    # what a file manager or a reader leaves there does not matter
    (folder / ".DS_Store").write_text("", encoding="utf-8")
    (folder / "notes").mkdir()
    monkeypatch.setattr(store, "make_checkpoint", lambda *_, **__: pytest.fail("made again"))
    assert lm.checkpoint("prime-sums", "small") == folder
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]
    model, _ = lm.load("prime-sums", "small")
    assert model.config.vocab_size == len(lm.build_tokenizer())


def _truncate(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)


def _flip(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xff")


def _into_a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("", encoding="utf-8")


def _into_a_dangling_link(folder):
    shutil.rmtree(folder)
    folder.symlink_to(folder.parent / "nowhere")


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _flip,
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / store.CARD).unlink(),
        lambda folder: (folder / store.CARD).write_text("{", encoding="utf-8"),
        lambda folder: (folder / store.CARD).write_text("[]", encoding="utf-8"),
        lambda folder: (folder / store.CARD).write_text('{"sha256": {}}', encoding="utf-8"),
        lambda folder: (folder / store.CARD).write_text('{"sha256": "0"}', encoding="utf-8"),
        _into_a_file,
        _into_a_dangling_link,
    ],
    ids=[
        "truncated",
        "flipped",
        "file missing",
        "card missing",
        "card cut",
        "card odd",
        "card empty",
        "card of no files",
        "file",
        "dangling link",
    ],
)
def test_a_damaged_entry_is_made_again(cut_small, damage):
    folder = lm.checkpoint("prime-sums", "small")
    damage(folder)
    assert not store.is_whole(folder)
    assert lm.checkpoint("prime-sums", "small") == folder
    assert store.is_whole(folder)


def test_a_cut_run_leaves_nothing(cut_small, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as cut:
        cut.setattr(store, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lm.checkpoint("prime-sums", "small")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_faster_process_wins(cut_small, monkeypatch):
    made = lm.checkpoint("prime-sums", "small")
    theirs = made.rename(made.parent / "theirs")
    make = store.make_checkpoint

    def make_while_another_finishes(*args, **kwargs):
        make(*args, **kwargs)
        theirs.rename(made)
        (made / "theirs").touch()

    monkeypatch.setattr(store, "make_checkpoint", make_while_another_finishes)
    assert lm.checkpoint("prime-sums", "small") == made
    assert (made / "theirs").exists()


def test_an_entry_that_cannot_be_put_in_its_place_is_an_error(cut_small, monkeypatch):
    def refuse(*args):
        raise PermissionError("no")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError):
        lm.checkpoint("prime-sums", "small")


def test_the_cache_may_be_under_the_home_folder(cut_small, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))  # Windows
    monkeypatch.setenv("COMPANION_CACHE", "~/models")
    assert lm.checkpoint("prime-sums", "small").parent == tmp_path / "models"


@pytest.mark.parametrize("cache", ["file", "file/folder"])
def test_a_cache_that_is_no_folder_is_named(cut_small, tmp_path, monkeypatch, cache):
    (tmp_path / "file").touch()
    monkeypatch.setenv("COMPANION_CACHE", str(tmp_path / cache))
    with pytest.raises(ValueError, match=r"kept in .*file.*: let COMPANION_CACHE name a folder"):
        lm.checkpoint("prime-sums", "small")


@pytest.mark.parametrize("change", ["recipe", "size", "characters"])
def test_another_recipe_is_another_entry(cut_small, monkeypatch, change):
    first = lm.checkpoint("prime-sums", "small")
    if change == "recipe":
        recipe = replace(store.RECIPES["prime-sums", "small"], steps=3)
        monkeypatch.setitem(store.RECIPES, ("prime-sums", "small"), recipe)
    elif change == "size":
        monkeypatch.setitem(store.SIZES, "small", store.SIZES["tiny"] | {"num_hidden_layers": 1})
    else:
        monkeypatch.setattr(store, "CHARACTERS", (*store.CHARACTERS, "龍"))
    assert lm.checkpoint("prime-sums", "small") != first


def test_unknown_names():
    with pytest.raises(ValueError, match="task_name: unknown task 'chess'; known: prime-sums, sor"):
        lm.checkpoint("chess")
    with pytest.raises(ValueError, match="size: unknown size 'huge'; known: tiny, small"):
        lm.load("sorting", "huge")


def test_the_command_explains_itself():
    command = [sys.executable, str(ROOT / "tools" / "make_checkpoints.py"), "--help"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert "--task" in done.stdout
