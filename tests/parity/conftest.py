"""What the parity tests share: random batches, sharp models, and the tolerance of a release."""

import pytest
import torch
import trl
from packaging.version import Version

from companion.lm import build_tokenizer, new_model

# 1.16.0 computes log-probs in float32 whatever the model's dtype, 1.14.2 does not; 1.15.0 does
# not run without triton.
FP32_LOG_PROBS = Version(trl.__version__) >= Version("1.15")


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request):
    return request.param


@pytest.fixture
def random_ids(tokenizer):
    """Make (prompts, responses, responses, ...) of unequal lengths, EOS at a response's end."""

    def make(seed: int, rows: int = 6, responses: int = 2):
        g = torch.Generator().manual_seed(seed)

        def ids(low, high):
            length = int(torch.randint(low, high, (), generator=g))
            return torch.randint(4, len(tokenizer), (length,), generator=g).tolist()

        prompts = [ids(1, 7) for _ in range(rows)]
        sides = [
            [ids(0, 9) + [tokenizer.eos_token_id] for _ in range(rows)] for _ in range(responses)
        ]
        return prompts, *sides

    return make


def scaled(model, factor: float):
    """A random model with its weights scaled, and so the size of its log-ratios and gradients."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= factor
    return model


@pytest.fixture
def random_model(dtype):
    return lambda seed, factor: scaled(new_model(seed=seed, dtype=dtype), factor)


@pytest.fixture
def assert_parity(dtype, record_property):
    """Compare our loss, already back-propagated through `model`, with TRL's; record the gaps."""

    def compare(method, model, loss, theirs, *, fp32_release=FP32_LOG_PROBS):
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert gradients.keys() == theirs.gradients.keys()
        gaps = [(g - theirs.gradients[name]).abs().max().item() for name, g in gradients.items()]
        record_property(f"{method} loss", (loss - theirs.loss).abs().item())
        record_property(f"{method} gradient", max(gaps))
        exact = dtype == torch.float64 and not fp32_release
        tolerance = dict(rtol=0, atol=1e-12) if exact else dict(rtol=1e-6, atol=1e-6)
        ours = loss.detach()
        torch.testing.assert_close(ours, theirs.loss, check_dtype=False, **tolerance)
        torch.testing.assert_close(gradients, theirs.gradients, check_dtype=False, **tolerance)

    return compare
