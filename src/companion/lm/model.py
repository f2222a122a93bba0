"""The language model's sizes: a Qwen2 from a config, random weights from a seed."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from companion.lm.tokenizer import build_tokenizer

SIZES = {
    "tiny": dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4),
    "small": dict(num_hidden_layers=4, hidden_size=256, num_attention_heads=8),
}


def new_model(
    size: str = "tiny", *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Qwen2ForCausalLM:
    """Build an untrained model of one of `SIZES`; the same seed gives the same weights.

    The caller's random state is left as it was. A model made here knows no folder on disk:
    a trainer that needs a reference policy asks for a saved one (see `companion.lm.load`).

    Raises:
        ValueError: `size` is unknown.
    """
    if size not in SIZES:
        raise ValueError(f"size: unknown size {size!r}; known: {', '.join(SIZES)}")
    shape = SIZES[size]
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        **shape,
        num_key_value_heads=shape["num_attention_heads"],
        intermediate_size=4 * shape["hidden_size"],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        # Qwen2's 0.02 is meant for wide layers; at this width the model would learn nothing for
        # the first hundred steps
        initializer_range=shape["hidden_size"] ** -0.5,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).to(dtype).eval()
