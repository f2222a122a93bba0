"""tools/matrix.py: the releases that were asked for, their largest differences, one table."""

from subprocess import CompletedProcess

import pytest

import matrix
import runtimes

REPORT = """<testsuites><testsuite>
<testcase name="test_dpo[0-0.1-float64]"><properties>
<property name="DPO loss" value="2e-15"/><property name="DPO gradient" value="1e-16"/>
</properties></testcase>
<testcase name="test_dpo[1-0.1-float64]"><properties>
<property name="DPO loss" value="5e-16"/><property name="DPO gradient" value="3e-16"/>
</properties></testcase>
<testcase name="test_dpo[0-0.1-float32]"><properties>
<property name="DPO loss" value="1e-06"/>
</properties></testcase>
<testcase name="test_dpo_equals_other_libraries"/>
</testsuite></testsuites>"""

LARGEST = {("DPO loss", "float64"): 2e-15, ("DPO gradient", "float64"): 3e-16,
           ("DPO loss", "float32"): 1e-6}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A checkout where pip, python and pytest do as they are told."""
    (tmp_path / "build").mkdir()
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "OVERLAYS", tmp_path / "build" / "overlays")
    told = {"pip": 0, "trl": "1.16.0", "pytest": 0, "report": REPORT}

    def run(command, *, check=False, **options):
        status, out = 0, ""
        if "pip" in command:
            status = told["pip"]
        elif "pytest" in command:
            status = told["pytest"]
            (tmp_path / "build" / "parity-trl-1.16.0.xml").write_text(
                told["report"], encoding="utf-8")
        else:
            out = told["trl"] + "\n"
        done = CompletedProcess(command, status, stdout=out)
        if check:
            done.check_returncode()
        return done

    monkeypatch.setattr(matrix.subprocess, "run", run)
    return told


def test_a_release_s_largest_differences_are_read(machine):
    assert matrix.run_parity("1.16.0", None) == LARGEST


@pytest.mark.parametrize("told, message", [
    ({"trl": "1.12.0"}, "TRL 1.16.0 was asked for, but 1.12.0 is imported"),
    ({"trl": ""}, "TRL 1.16.0 was asked for, but none is imported"),
    ({"pytest": 1}, "parity fails under TRL 1.16.0"),
    ({"report": "<testsuites/>"}, "records no difference"),
    ({"pip": 1}, "TRL 1.16.0 cannot be installed"),
])  # fmt: skip
def test_a_release_that_is_not_shown_to_agree_ends_the_run(machine, told, message):
    machine.update(told)
    with pytest.raises(SystemExit, match=message):
        matrix.run_parity("1.16.0", matrix.overlay("1.16.0"))


def test_the_table_has_a_column_a_release_and_a_dash_where_nothing_was_recorded():
    assert matrix.table({"1.12.0": LARGEST, "1.8.0": {("DPO loss", "float64"): 3e-15}}) == (
        "| 最大差 / largest difference | TRL 1.12.0 | TRL 1.8.0 |\n"
        "| --- | --- | --- |\n"
        "| DPO gradient, float64 | 3e-16 | – |\n"
        "| DPO loss, float64 | 2e-15 | 3e-15 |\n"
        "| DPO loss, float32 | 1e-06 | – |")


def test_runtimes_must_have_the_rows_that_parity_records(monkeypatch, tmp_path):
    path = tmp_path / "RUNTIMES.md"
    monkeypatch.setattr(matrix, "read_section", lambda name: runtimes.read_section(name, path))
    monkeypatch.setattr(
        matrix, "update_section", lambda name, body: runtimes.update_section(name, body, path))
    monkeypatch.setattr(matrix, "overlay", lambda release: tmp_path)
    recorded = dict(LARGEST)
    monkeypatch.setattr(matrix, "run_parity", lambda release, folder: recorded)

    with pytest.raises(SystemExit, match="RUNTIMES.md"):
        matrix.main(["--releases", "1.16.0"])
    matrix.main(["--releases", "1.8.0", "1.16.0", "--write"])
    written = runtimes.read_section("matrix", path)
    assert written == matrix.table({"1.8.0": LARGEST, "1.16.0": LARGEST})
    matrix.main(["--releases", "1.16.0"])
    assert runtimes.read_section("matrix", path) == written
    del recorded["DPO loss", "float32"]  # a release that cannot run it
    matrix.main(["--releases", "1.16.0"])
    recorded["KTO loss", "float64"] = 0.0
    with pytest.raises(SystemExit, match="--write"):
        matrix.main(["--releases", "1.16.0"])
