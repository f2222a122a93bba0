"""tools/check.py: every test is in a stage; stages meet a bad day, and a failed one fails all."""

import os
import subprocess
import sys

import pytest

import check


def runs(code):
    return (sys.executable, "-c", code)


def test_every_test_is_in_a_stage(root):
    elsewhere = " ".join(word for name, stage in check.STAGES.items() if name != "unit"
                         for word in stage).split()
    for word in check.STAGES["unit"]:
        if word.startswith("--ignore="):
            path = word.removeprefix("--ignore=")
            assert path in elsewhere and (root / path).exists()


def test_stages_are_timed_and_a_failed_one_fails_all(monkeypatch, capfd):
    monkeypatch.setattr(check, "STAGES", {"good": runs("print(1)"), "bad": runs("exit(3)")})
    assert check.main([]) == 1
    out = capfd.readouterr().out
    assert "good" in out and "passed" in out and "bad" in out and "FAILED" in out
    assert out.endswith("stages: 1 passed, 1 failed\n")
    assert check.main(["good"]) == 0
    with pytest.raises(SystemExit):
        check.main(["ugly"])


def test_a_stage_has_no_hub_no_cache_no_input_and_files_want_an_encoding(root):
    stage = runs("import os, sys; print(os.environ['HF_HUB_OFFLINE'], "
                 "os.listdir(os.environ['HF_HOME']), os.environ['OMP_NUM_THREADS'], "
                 "sys.flags.warn_default_encoding, repr(sys.stdin.read()))")
    code = f"import check; check.STAGES = dict(look={stage}); raise SystemExit(check.main([]))"
    done = subprocess.run(runs(code), cwd=root / "tools", input="typed", capture_output=True,
                          encoding="utf-8",
                          env={**os.environ, "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "1 [] 1 1 ''"
