"""README's tests, stage by stage, each timed.

    python tools/check.py                 all stages
    python tools/check.py unit parity     these

Every stage runs even when an earlier one failed; the exit status is 0 when all passed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PYTEST = (sys.executable, "-m", "pytest", "-q")
# Two processes of one thread each; a file's tests stay together, and share what they set up.
PARALLEL = ("-n", "2", "--dist", "loadfile")
SHAPES = "--jaxtyping-packages=companion,beartype.beartype"  # shapes in annotations are checked

STAGES = {
    "ruff": (sys.executable, "-m", "ruff", "check"),
    "unit": (*PYTEST, *PARALLEL, SHAPES, "--ignore=tests/parity", "--ignore=tests/cases",
             "--ignore=tests/test_notebooks.py", "--ignore=tests/test_exercises.py",
             "--ignore=tests/exercises"),
    "parity": (*PYTEST, *PARALLEL, SHAPES, "tests/parity"),
    "cases": (*PYTEST, *PARALLEL, SHAPES, "tests/cases"),
    # The text and the stored outputs of the notebooks, then the notebooks anew, as they stand.
    "notebooks": (*PYTEST, *PARALLEL, "--nbmake", "--nbmake-timeout=300", "tests/test_notebooks.py",
                  "notebooks", "--ignore=notebooks/exercises"),
    "trl-1.16.0": (sys.executable, "tools/matrix.py", "--releases", "1.16.0"),
    "exercises": (*PYTEST, *PARALLEL, "tests/test_exercises.py", "tests/exercises"),
}


def environment(hub: str) -> dict[str, str]:
    """What a bad day has: no hub and nothing of it in the cache, files that want an encoding."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": hub,
        "OMP_NUM_THREADS": "1",  # two threads spin against each other
        "PYTHONWARNDEFAULTENCODING": "1",
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the stages; 0 when all passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    wanted = parser.parse_args(arguments).stages or list(STAGES)
    for stage in wanted:
        if stage not in STAGES:
            parser.error(f"no stage {stage!r}; there are: {', '.join(STAGES)}")

    results = []
    with tempfile.TemporaryDirectory() as hub:
        for stage in wanted:
            print(f"== {stage}", flush=True)
            began = time.perf_counter()
            status = subprocess.run(
                STAGES[stage], cwd=ROOT, env=environment(hub), stdin=subprocess.DEVNULL
            ).returncode
            results.append((stage, time.perf_counter() - began, status))
    print("\n== time of each stage")
    for stage, seconds, status in results:
        print(f"{stage:<12} {seconds:7.1f} s  {'passed' if status == 0 else 'FAILED'}")
    failed = sum(status != 0 for _, _, status in results)
    print(f"{'all':<12} {sum(seconds for _, seconds, _ in results):7.1f} s")
    print(f"stages: {len(results) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
