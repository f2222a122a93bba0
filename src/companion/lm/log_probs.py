"""Log-probabilities of completions under a causal language model."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from companion.lm.tokenizer import encode


def token_log_probs(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch time"],
    attention_mask: Int[Tensor, "batch time"],
    completion_mask: Int[Tensor, "batch time"],
    temperature: float = 1.0,
) -> Float[Tensor, "batch time"]:
    """log π(y_t | x, y_<t) at the position of each completion token, 0 elsewhere.

    The token at position t is scored by the logits of position t − 1, so the first completion
    token is scored from the last prompt token. Padding may stand on either side: positions are
    counted over real tokens, and pads are told by the mask, never by their value (pad may be eos).

    Args:
        input_ids: prompt and completion, padded left or right.
        attention_mask: not 0 on real tokens.
        completion_mask: not 0 on the completion's tokens, the final EOS included.
        temperature: the logits are divided by it before the softmax.

    Returns:
        Log-probs in nats and the model's dtype.

    Raises:
        ValueError: ids that are no (batch, time) or are empty, shapes that differ, a completion
            token under the attention mask or without a prompt token before it, a temperature that
            is not finite and above 0.
    """
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(
            f"input_ids must be (batch, time) and not empty, got shape {tuple(input_ids.shape)}"
        )
    masks = {"attention_mask": attention_mask, "completion_mask": completion_mask}
    for name, mask in masks.items():
        if mask.shape != input_ids.shape:
            raise ValueError(
                f"{name} must have the shape of input_ids: "
                f"{tuple(input_ids.shape)}, got {tuple(mask.shape)}"
            )
    scored, real = completion_mask.bool(), attention_mask.bool()
    orphans = scored & ~real
    orphans[:, 1:] |= scored[:, 1:] & ~real[:, :-1]
    orphans[:, :1] |= scored[:, :1]
    if orphans.any():
        row, position = orphans.nonzero()[0].tolist()
        raise ValueError(
            f"completion_mask[{row}, {position}] marks a token that is masked "
            "or has no token before it to be predicted from"
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be finite and above 0, got {temperature}")

    position_ids = (real.cumsum(-1) - 1).clamp(min=0)
    logits = model(
        input_ids=input_ids,
        attention_mask=real.long(),
        position_ids=position_ids,
        use_cache=False,
    ).logits[:, :-1] / temperature
    # Masked before the softmax: after it, 0 times a NaN under the mask would be a NaN gradient.
    logits = torch.where(scored[:, 1:, None], logits, 0.0)
    logps = logits.gather(-1, input_ids[:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)
    logps = torch.where(scored[:, 1:], logps, 0.0)
    return torch.nn.functional.pad(logps, (1, 0))


def sequence_log_probs(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "batch time"],
    attention_mask: Int[Tensor, "batch time"],
    completion_mask: Int[Tensor, "batch time"],
    temperature: float = 1.0,
) -> Float[Tensor, " batch"]:
    """log π(y | x): the sum of `token_log_probs` over the completion, same arguments and errors."""
    return token_log_probs(
        model, input_ids, attention_mask, completion_mask, temperature
    ).sum(-1)


def completion_batch(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    eos: bool = True,
) -> dict[str, Int[Tensor, "batch time"]]:
    """Inputs of `token_log_probs` for texts: prompt, completion, EOS, then padding on the right.

    Prompt and completion are tokenized apart, so that no token spans their seam.

    Args:
        eos: whether an EOS ends each completion, as trainers have it.

    Returns:
        ``input_ids``, ``attention_mask`` and ``completion_mask``.

    Raises:
        ValueError: no rows, columns of unequal length, an empty prompt, an empty completion
            without EOS, or a character that the tokenizer does not know.
    """
    if len(prompts) != len(completions):
        raise ValueError(f"completions has {len(completions)} rows, prompts {len(prompts)}")
    if not prompts:
        raise ValueError("prompts is empty")
    encoded = encode(tokenizer, prompts, "prompts"), encode(tokenizer, completions, "completions")
    rows = []
    for i, (prompt_ids, completion_ids) in enumerate(zip(*encoded, strict=True)):
        completion_ids = completion_ids + [tokenizer.eos_token_id] * eos
        for name, ids in (("prompts", prompt_ids), ("completions", completion_ids)):
            if not ids:
                raise ValueError(f"{name}[{i}] is empty")
        rows.append((prompt_ids, completion_ids))
    width = max(len(prompt_ids) + len(completion_ids) for prompt_ids, completion_ids in rows)
    input_ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    completion_mask = torch.zeros_like(input_ids)
    for i, (prompt_ids, completion_ids) in enumerate(rows):
        start, end = len(prompt_ids), len(prompt_ids) + len(completion_ids)
        input_ids[i, :end] = torch.tensor(prompt_ids + completion_ids)
        attention_mask[i, :end] = 1
        completion_mask[i, start:end] = 1
    return dict(
        input_ids=input_ids, attention_mask=attention_mask, completion_mask=completion_mask
    )
