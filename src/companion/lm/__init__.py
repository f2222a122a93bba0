"""The small language model: characters in, characters out, warmed up on a task."""

from companion.lm.generate import generate
from companion.lm.log_probs import completion_batch, sequence_log_probs, token_log_probs
from companion.lm.model import new_model
from companion.lm.score import score
from companion.lm.store import checkpoint, load, measure
from companion.lm.tokenizer import build_tokenizer

__all__ = [
    "build_tokenizer",
    "checkpoint",
    "completion_batch",
    "generate",
    "load",
    "measure",
    "new_model",
    "score",
    "sequence_log_probs",
    "token_log_probs",
]
