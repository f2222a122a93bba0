"""What holds in every test, and in the notebooks that nbmake runs: no hub, one thread."""

import os
from pathlib import Path

# Before anything imports the hub's client, or starts a kernel that will.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from jaxtyping import config as jaxtyping_config  # noqa: E402
from nbclient import NotebookClient  # noqa: E402

# A graceful end of a kernel costs seconds and nothing is gained by it.
NotebookClient.shutdown_kernel.default_value = "immediate"

torch.set_num_threads(1)

# The same examples every time, and a slow machine is no failure.
hypothesis.settings.register_profile("companion", deadline=None, derandomize=True)
hypothesis.settings.load_profile("companion")


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def own_errors_first(request):
    """Under --jaxtyping-packages, leave bad input to the checks that readers meet."""
    if request.node.get_closest_marker("bad_input") is None:
        yield
        return
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)
