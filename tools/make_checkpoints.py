"""Make the warmed-up models that are shipped with the package, and the card that tells how.

    python tools/make_checkpoints.py [--task TASK ...]

It takes ten to twenty seconds a task on one core. The same machine gives the same bytes; another
one may differ in the last digits of the weights.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch

from companion.lm.store import CARD, SHIPPED, make_checkpoint
from companion.tasks import TASKS
from companion.training import quiet

README = """\
# Warmed-up tiny models

Each folder is a Qwen2 of {parameters:,} parameters with one token a character, warmed up on one
task of `companion.tasks`. Made by

    python tools/make_checkpoints.py

in a plain loop over demonstrations of which {right:.0%} are right and the others plausible
mistakes (AdamW, cosine schedule; the numbers stand in each folder's `card.json` and below). So
a model knows the answer, as its greedy responses show, and samples it only part of the time.

| task | steps | batch | learning rate | seed | prompts | greedy | sampled |
|---|---|---|---|---|---|---|---|
{rows}

Accuracy is the share of exactly right responses on up to 500 prompts; sampled: temperature 1,
four samples a prompt. Sorting is measured on prompts held out from all training data: no
rearrangement of a held-out prompt's digits occurs there. The hundred prime sums are learned by
heart: the prompts in training are the prompts measured. Weights are float32 safetensors; there
is no pickle.

Load them with `companion.lm.load`. `AutoTokenizer` puts Qwen2's own splitting in place of the
saved one and loses Japanese text.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--task", nargs="+", choices=sorted(TASKS), default=sorted(TASKS), help="default: all"
    )
    tasks = parser.parse_args().task
    quiet()
    torch.set_num_threads(1)
    for name in tasks:
        with tempfile.TemporaryDirectory() as workshop:
            made = Path(workshop) / name
            card = make_checkpoint(TASKS[name], "tiny", made)
            shutil.rmtree(SHIPPED / name, ignore_errors=True)
            shutil.copytree(made, SHIPPED / name)
        print(name, json.dumps(card["figures"]))
    write_readme()


def write_readme() -> None:
    cards = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(SHIPPED.glob(f"*/{CARD}"))
    ]
    rows = []
    for card in cards:
        recipe, figures = card["recipe"], card["figures"]
        for split in ["train", "test"] if figures["held_out"] else ["test"]:
            label = "training" if not figures["held_out"] or split == "train" else "held out"
            rows.append(
                f"| {card['task']} | {recipe['steps']} | {recipe['batch_size']} "
                f"| {recipe['learning_rate']} | {recipe['seed']} | {label} "
                f"| {figures[split]['greedy']:.3f} | {figures[split]['sampled']:.3f} |"
            )
    text = README.format(
        parameters=cards[0]["parameters"], right=cards[0]["recipe"]["right"], rows="\n".join(rows)
    )
    (SHIPPED / "README.md").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
