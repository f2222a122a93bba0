"""Responses of a model to a list of prompts."""

import math
from collections.abc import Sequence

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from companion.lm.tokenizer import encode


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float | None = None,
    seed: int = 0,
    batch_size: int = 512,
    progress: bool = False,
) -> list[str]:
    """Answer each prompt, greedily (`temperature=None`) or by sampling.

    Sampling is from the whole softmax of logits / temperature: no top-k, no top-p. A response
    ends before `<eos>`, or another end token of the model's generation config, or after
    `max_new_tokens` tokens. The same seed gives the same responses and leaves the caller's random
    state and the model's train/eval mode as they were.

    Raises:
        ValueError: a prompt is empty or has a character that the tokenizer does not know, or a
            number is out of range.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: must be at least 1, got {max_new_tokens}")
    if batch_size < 1:
        raise ValueError(f"batch_size: must be at least 1, got {batch_size}")
    if temperature is not None and not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature: must be finite and above 0 (None is greedy), got {temperature}"
        )
    for i, ids in enumerate(encode(tokenizer, prompts, "prompts")):
        if not ids:
            raise ValueError(f"prompts[{i}]: is empty")

    if temperature is None:
        sampling = dict(do_sample=False)
    else:
        sampling = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0)
    ends = model.generation_config.eos_token_id  # one id, a list of them, or None
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    starts = range(0, len(prompts), batch_size)
    cuda = [model.device] if model.device.type == "cuda" else []
    was_training = model.training
    model.eval()
    responses = []
    try:
        with torch.random.fork_rng(devices=cuda), torch.inference_mode():
            torch.manual_seed(seed)
            for start in tqdm(starts, desc="generate", disable=not progress, leave=False):
                batch = list(prompts[start : start + batch_size])
                inputs = tokenizer(batch, padding=True, return_tensors="pt").to(model.device)
                outputs = model.generate(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    max_new_tokens=max_new_tokens,
                    pad_token_id=tokenizer.pad_token_id,
                    eos_token_id=sorted(ends),
                    **sampling,
                )
                new = outputs[:, inputs["input_ids"].shape[1] :]
                for ids in new.tolist():
                    end = next((t for t, token in enumerate(ids) if token in ends), len(ids))
                    responses.append(tokenizer.decode(ids[:end], skip_special_tokens=True))
    finally:
        model.train(was_training)
    return responses
