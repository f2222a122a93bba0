"""A reward model's score of texts."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from companion.lm.log_probs import completion_batch


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    eos: bool = True,
    batch_size: int = 512,
) -> Float[Tensor, " batch"]:
    """r(x, y) of each response, read at its last token.

    The last token is told by the attention mask. The classifier's own forward looks for the last
    id that is not the pad's, which misses the end token where pad and eos are one.

    Args:
        model: a sequence classifier with one output.
        eos: whether an EOS ends each completion, as RewardTrainer has it in training.

    Returns:
        Data on the CPU in the model's dtype; the model's train/eval mode is left as it was.

    Raises:
        ValueError: the model has no score head of one output, `batch_size` is below 1, or a row
            that `completion_batch` refuses.
    """
    if getattr(getattr(model, "score", None), "out_features", None) != 1:
        raise ValueError("model must be a sequence classifier with num_labels=1")
    if batch_size < 1:
        raise ValueError(f"batch_size: must be at least 1, got {batch_size}")
    rows = completion_batch(tokenizer, prompts, completions, eos=eos)
    ids, mask = rows["input_ids"].to(model.device), rows["attention_mask"].to(model.device)
    last = mask.sum(-1) - 1  # the padding stands on the right
    was_training = model.training
    model.eval()
    scores = []
    try:
        with torch.no_grad():
            for start in range(0, len(ids), batch_size):
                part = slice(start, start + batch_size)
                hidden = model.base_model(
                    input_ids=ids[part], attention_mask=mask[part], use_cache=False
                ).last_hidden_state
                at_last = hidden[torch.arange(len(hidden), device=hidden.device), last[part]]
                scores.append(model.score(at_last).squeeze(-1).cpu())
    finally:
        model.train(was_training)
    return torch.cat(scores)
