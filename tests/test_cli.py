"""python -m companion, as a reader types it."""

import os
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from companion import runner
from companion.__main__ import main
from companion.sections import SECTIONS


def typed(*words, cwd, **variables):
    """Run the command in another process, standard input closed, from another folder."""
    return subprocess.run(
        [sys.executable, "-m", "companion", *words], cwd=cwd, capture_output=True,
        encoding="utf-8", env={**os.environ, "PYTHONUTF8": "1", **variables},
        stdin=subprocess.DEVNULL if os.name == "nt" else None,
        preexec_fn=None if os.name == "nt" else lambda: os.close(0),
    )  # fmt: skip


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A checkout whose 4.5.1 is as given."""
    monkeypatch.setattr(runner, "checkout", lambda: tmp_path)
    (tmp_path / "notebooks").mkdir()

    def write(*code):
        cells = [new_markdown_cell("# 題"), *map(new_code_cell, code)]
        nbformat.write(new_notebook(cells=cells), tmp_path / "notebooks" / "4.5.1-dpo.ipynb")
        return tmp_path / "build"

    return write


def test_list_shows_every_section_and_marks_those_to_come(tmp_path):
    done = typed("list", cwd=tmp_path)
    lines = done.stdout.splitlines()[1:]
    assert done.returncode == 0 and len(lines) == len(SECTIONS)
    for section, line in zip(SECTIONS, lines, strict=True):
        assert line.startswith(section.number) and section.trainer in line
        assert ("準備中" in line) != section.ready
        assert (section.notebook in line) == section.ready


def test_list_prints_to_a_console_that_lacks_letters(tmp_path):
    assert typed("list", cwd=tmp_path, PYTHONUTF8="0", PYTHONIOENCODING="ascii").returncode == 0


@pytest.mark.skipif(os.name == "nt", reason="Windows ends a pipe in another way")
def test_a_reader_that_leaves_is_no_error():
    for variables in ({}, {"PYTHONUNBUFFERED": "1"}):  # noticed at the end, and at once
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(
            [sys.executable, "-m", "companion", "list"], stdout=writing, stderr=subprocess.PIPE,
            encoding="utf-8", env={**os.environ, "PYTHONUNBUFFERED": "", **variables},
        )  # fmt: skip
        os.close(writing)
        assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(os.name == "nt", reason="the shell is another")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error(closed):
    done = subprocess.run(f'"{sys.executable}" -m companion list {closed}', shell=True,
                          capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (closed == "2>&-")


@pytest.mark.skipif(os.name == "nt", reason="the shell is another")
def test_a_notebook_runs_without_output_streams(book, monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it, a kernel leaves its streams alone
    build = book("print(6 * 7)")
    # As on a command line, nothing that opens files is imported before `main` has the streams.
    code = ("import sys; from pathlib import Path; from companion import __main__, sections\n"
            "def find(number):\n    from companion import runner\n"
            f"    runner.checkout = lambda: Path({str(build.parent)!r})\n"
            "    return sections.find(number)\n"
            "__main__.find = find\nsys.exit(__main__.main(['run', '4.5.1']))")
    done = subprocess.run(f'"{sys.executable}" -c "$CODE" >&- 2>&-', shell=True,
                          env={**os.environ, "CODE": code})
    assert done.returncode == 0
    cells = nbformat.read(build / "4.5.1-dpo.ipynb", as_version=4).cells
    assert cells[1].outputs[0].text == "42\n"


@pytest.mark.parametrize("command", [(), ("list",), ("run",), ("info",)])
def test_help(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert "usage: python -m companion" in capsys.readouterr().out


def test_info_shows_versions_device_and_preset(tmp_path):
    done = typed("info", cwd=tmp_path, COMPANION_PRESET="cpu", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    for word in ("Python", "torch", "transformers", "trl", "CUDA", "preset cpu"):
        assert word in done.stdout


def test_info_refuses_an_unknown_preset_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("COMPANION_PRESET", "tpu")
    assert main(["info"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "COMPANION_PRESET" in err and "'tpu'" in err


def test_an_unknown_section_lists_the_known_ones(tmp_path):
    done = typed("run", "4.5", cwd=tmp_path)
    assert done.returncode == 2
    assert all(section.number in done.stderr for section in SECTIONS)


def test_a_section_to_come_says_so(capsys):
    assert main(["run", "grpo-in-practice"]) == 2
    assert "準備中" in capsys.readouterr().err


def test_run_leaves_notebook_and_page_and_says_where(book, capsys):
    build = book("print(6 * 7)", "import os; print(os.environ['COMPANION_PRESET'])")
    assert main(["run", "4.5.1", "--preset", "gpu"]) == 0
    out = capsys.readouterr().out
    assert "[  1/2] 題 … " in out and "完了しました" in out
    for path in (build / "4.5.1-dpo.ipynb", build / "4.5.1-dpo.html"):
        assert str(path) in out and path.exists()
    cells = nbformat.read(build / "4.5.1-dpo.ipynb", as_version=4).cells
    assert [cell.outputs[0].text for cell in cells[1:]] == ["42\n", "gpu\n"]


def test_a_cell_that_fails_is_named_and_the_rest_is_kept(book, capsys):
    build = book("print(6 * 7)", "assert False, '左辺と右辺が違います'")
    assert main(["run", "4.5.1"]) == 1
    err = capsys.readouterr().err
    assert "セル 2/2「題」: AssertionError: 左辺と右辺が違います" in err
    assert str(build / "4.5.1-dpo.html") in err
    cells = nbformat.read(build / "4.5.1-dpo.ipynb", as_version=4).cells
    assert cells[1].outputs[0].text == "42\n" and cells[2].outputs[0].output_type == "error"


def _build_is_a_file(root):
    (root / "build").touch()
    return "build"


def _result_is_a_folder(root):
    (root / "build" / "4.5.1-dpo.ipynb").mkdir(parents=True)
    return "4.5.1-dpo.ipynb"


def _no_notebook(root):
    (root / "notebooks" / "4.5.1-dpo.ipynb").unlink()
    return "4.5.1-dpo.ipynb"


def _broken_notebook(root):
    (root / "notebooks" / "4.5.1-dpo.ipynb").write_text("{", encoding="utf-8")
    return "4.5.1-dpo.ipynb"


@pytest.mark.parametrize("spoil", [
    _build_is_a_file, _result_is_a_folder, _no_notebook, _broken_notebook])
def test_a_file_that_cannot_be_read_or_written_is_one_line(book, capsys, spoil):
    named = spoil(book("print(1)").parent)
    assert main(["run", "4.5.1"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and named in err


def test_a_run_that_somebody_stops_says_so(book, monkeypatch, capsys):
    def stopped(*arguments, **options):
        raise KeyboardInterrupt

    book("print(1)")
    monkeypatch.setattr(runner, "execute", stopped)
    assert main(["run", "4.5.1"]) == 130
    assert "中断しました" in capsys.readouterr().err


def test_without_a_checkout_run_says_how_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runner, "__file__", str(tmp_path / "lib" / "companion" / "runner.py"))
    assert main(["run", "4.5.1"]) == 1
    assert "pip install" in capsys.readouterr().err


def test_a_preset_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", "4.5.1", "--preset", "tpu"])
    assert ended.value.code == 2
    assert "tpu" in capsys.readouterr().err
