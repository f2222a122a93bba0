"""The warm-up: supervised learning on demonstrations, in a plain loop.

Demonstrations are right only part of the time. The model that imitates them knows the answer
(its most probable response is right) and yet samples it only that often, so that every method
that learns from rewards or preferences has something to learn from its first step.
"""

import torch
import torch.nn.functional as F
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from companion.lm.log_probs import completion_batch

IGNORED = -100  # the label that cross_entropy leaves out


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    demonstrations: Dataset,
    *,
    batch_size: int = 64,
    learning_rate: float = 5e-3,
    progress: bool = True,
) -> list[float]:
    """Train `model` in place, once over `demonstrations`, and return the loss of each step.

    The loss is the mean negative log-probability (nats) of the completions' tokens, `<eos>`
    included; prompts are given, not learned. The rows are taken in their order: they are
    independent draws already. AdamW, with a cosine from `learning_rate` to 0.

    Args:
        demonstrations: columns `prompt` and `completion`, at least `batch_size` rows; rows that
            do not fill a last batch are left out.

    Raises:
        ValueError: too few rows, or one that `completion_batch` refuses; it calls the columns
            `prompts` and `completions`.
    """
    steps = len(demonstrations) // batch_size
    if steps == 0:
        raise ValueError(
            f"demonstrations: {len(demonstrations)} rows do not fill one batch of {batch_size}"
        )
    input_ids, labels = _tensors(tokenizer, demonstrations)
    input_ids, labels = input_ids.to(model.device), labels.to(model.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    model.train()
    bar = tqdm(range(steps), desc="warm-up", disable=not progress, leave=False)
    for step in bar:
        rows = slice(step * batch_size, (step + 1) * batch_size)
        # pads stand on the right, where no real token can attend to them: no mask is needed
        logits = model(input_ids=input_ids[rows]).logits[:, :-1]
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels[rows, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 10 == 0:
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
    model.eval()
    return losses


def _tensors(tokenizer: PreTrainedTokenizerFast, rows: Dataset) -> tuple[torch.Tensor, ...]:
    """Token ids and labels of all rows, (N, T), padded on the right."""
    batch = completion_batch(tokenizer, rows["prompt"][:], rows["completion"][:])
    labels = batch["input_ids"].where(batch["completion_mask"].bool(), IGNORED)
    return batch["input_ids"], labels
