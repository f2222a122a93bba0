"""Warmed-up models on disk: shipped with the package, or made once into the user's cache.

Trainers load their reference policy from the folder that a model came from, so a warmed-up
model is always saved first and loaded from there.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from platformdirs import user_cache_dir
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from companion.lm.generate import generate
from companion.lm.model import SIZES, new_model
from companion.lm.tokenizer import CHARACTERS, build_tokenizer
from companion.lm.warmup import warm_up
from companion.tasks import TASKS, Task, accuracy, demonstrations

SHIPPED = Path(__file__).parent / "checkpoints"
CARD = "card.json"


@dataclass(frozen=True)
class Recipe:
    """How a model of one size is warmed up on one task."""

    steps: int
    learning_rate: float
    batch_size: int = 64
    right: float = 0.4  # the share of right demonstrations
    seed: int = 0  # of the weights and of the demonstrations


RECIPES = {
    ("prime-sums", "tiny"): Recipe(steps=250, learning_rate=5e-3),
    ("sorting", "tiny"): Recipe(steps=500, learning_rate=5e-3),
    ("prime-sums", "small"): Recipe(steps=250, learning_rate=1e-3),
    ("sorting", "small"): Recipe(steps=250, learning_rate=1e-3),
}


def load(
    task_name: str, size: str = "tiny", *, dtype: torch.dtype = torch.float32
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Load the model that was warmed up on a task, and its tokenizer.

    Arguments and errors are those of `checkpoint`.
    """
    folder = checkpoint(task_name, size)
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    # not AutoTokenizer: for a Qwen2 model it puts Qwen2's own splitting in place of what was saved,
    # and Japanese text then has no tokens at all
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return model, tokenizer


def checkpoint(task_name: str, size: str = "tiny") -> Path:
    """The folder of the model that was warmed up on a task.

    The tiny ones come with the package. Others are made on first use, with a progress bar, in
    `COMPANION_CACHE` or the user's cache folder; an entry there that is not whole is made anew.

    Raises:
        ValueError: the task or the size is unknown, or the cache is no folder to write in.
    """
    if task_name not in TASKS:
        raise ValueError(f"task_name: unknown task {task_name!r}; known: {', '.join(TASKS)}")
    if size not in SIZES:
        raise ValueError(f"size: unknown size {size!r}; known: {', '.join(SIZES)}")
    if size == "tiny":
        return SHIPPED / task_name

    cache = os.environ.get("COMPANION_CACHE") or user_cache_dir("companion", appauthor=False)
    cache = Path(cache).expanduser()
    folder = cache / f"{task_name}-{size}-{_fingerprint(task_name, size)}"
    if is_whole(folder):
        return folder
    # made beside its place and moved there when complete: a run that is cut leaves no half
    try:
        cache.mkdir(parents=True, exist_ok=True)
        workshop = tempfile.TemporaryDirectory(dir=cache, prefix=".making-")
    except OSError as error:
        raise ValueError(
            f"no model can be kept in {cache} ({error.strerror}): "
            "let COMPANION_CACHE name a folder to write in"
        ) from error
    with workshop:
        made = Path(workshop.name) / "checkpoint"
        make_checkpoint(TASKS[task_name], size, made)
        if not is_whole(folder):
            if folder.is_symlink() or folder.is_file():
                folder.unlink()
            elif folder.exists():
                shutil.rmtree(folder)
        try:
            made.rename(folder)
        except OSError:
            if not is_whole(folder):  # else another process was faster
                raise
    return folder


def make_checkpoint(task: Task, size: str, folder: Path, *, progress: bool = True) -> dict:
    """Warm up a new model on a task, measure it and save it all in `folder`.

    Returns:
        The card, also saved as `card.json`: the recipe, the figures (accuracy on up to 500
        prompts of each split: greedy, and sampled at temperature 1 with four samples a prompt),
        the number of parameters and the SHA-256 of every file.
    """
    recipe = RECIPES[task.name, size]
    tokenizer = build_tokenizer()
    model = new_model(size, seed=recipe.seed).to("cuda" if torch.cuda.is_available() else "cpu")
    data = demonstrations(
        task, recipe.steps * recipe.batch_size, right=recipe.right, seed=recipe.seed
    )
    warm_up(
        model,
        tokenizer,
        data,
        batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        progress=progress,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    card = {
        "task": task.name,
        "size": size,
        "parameters": model.num_parameters(),
        "recipe": asdict(recipe),
        "figures": {
            "train": measure(model, tokenizer, task, task.train_prompts[:500]),
            "test": measure(model, tokenizer, task, task.test_prompts[:500]),
            "held_out": not set(task.train_prompts) & set(task.test_prompts),
        },
        "sha256": {
            path.name: _hash(path)
            for path in sorted(folder.iterdir())
            if path.is_file() and path.name not in (CARD, "README.md")
        },
    }
    (folder / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    return card


def measure(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    prompts: Sequence[str],
    *,
    samples: int = 4,
    seed: int = 0,
) -> dict[str, float]:
    """Accuracy of a model on `prompts`: greedy, and sampled `samples` times at temperature 1."""
    length = task.max_new_tokens
    repeated = list(prompts) * samples
    greedy = generate(model, tokenizer, prompts, max_new_tokens=length)
    sampled = generate(
        model, tokenizer, repeated, max_new_tokens=length, temperature=1.0, seed=seed
    )
    return {
        "greedy": accuracy(task, prompts, greedy),
        "sampled": accuracy(task, repeated, sampled),
    }


def is_whole(folder: Path) -> bool:
    """Whether a folder holds all that its card names, unchanged; other files do not matter."""
    try:
        promised = json.loads((folder / CARD).read_text(encoding="utf-8"))["sha256"]
        return bool(promised) and all(_hash(folder / name) == promised[name] for name in promised)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _fingerprint(task_name: str, size: str) -> str:
    """Changes with everything that a cached model depends on."""
    parts = [asdict(RECIPES[task_name, size]), SIZES[size], "".join(CHARACTERS)]
    return hashlib.sha256(json.dumps(parts).encode("utf-8")).hexdigest()[:12]
