"""companion.runner: a run is followed, measured, cleaned, and its failure kept and named."""

import os
import re
import subprocess
import sys

import nbformat
import pytest

from companion import runner

SOURCE = """# %% [markdown]
# # 題

# %%
import os, sys, time
time.sleep(0.5)
print(os.environ["COMPANION_PRESET"])
sys.stdout.flush()
print(os.path.basename(os.getcwd()), end="")

# %% [markdown]
# ## 学習

# %%
from tqdm.auto import tqdm
from IPython.display import HTML, display
print("前", flush=True)
for _ in tqdm(range(3)):
    pass
display(HTML("<progress value='3' max='3'></progress>"))
print("UserWarning: x", file=sys.stderr, flush=True)
print("後")
1 + 1
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def test_a_source_is_executed_followed_measured_and_cleaned(source, capsys):
    done = runner.execute(source, preset="gpu")
    first, second = (c for c in done.notebook.cells if c.cell_type == "code")
    assert [o.text for o in first.outputs] == [f"gpu\n{source.parent.name}"]
    stream, result = second.outputs
    assert (stream.name, stream.text) == ("stdout", "前\n後\n")
    assert result.data == {"text/plain": "2"}
    assert any("UserWarning: x" in text for text in done.dropped)
    assert "widgets" not in done.notebook.metadata
    assert "version" not in done.notebook.metadata.language_info
    assert all("execution" not in cell.metadata for cell in done.notebook.cells)
    assert done.seconds > 0 and done.cpu_seconds > 0.1 and done.peak_bytes > 20 * 2**20
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[  1/2] 題 … ") and lines[0].endswith(" 秒")
    assert lines[1].startswith("[  2/2] 学習 … ")
    shown = sum(float(re.search(r"([\d.]+) 秒$", line)[1]) for line in lines)
    assert done.seconds >= 0.5 and abs(done.seconds - shown) <= 0.11  # each is rounded


def test_variables_and_folder_are_the_kernel_s_alone(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COMPANION_PRESET", "cpu")
    (tmp_path / "sub").mkdir()
    done = runner.execute(source, folder=tmp_path / "sub", progress=False)
    assert done.notebook.cells[1].outputs[0].text == "cpu\nsub"
    done = runner.execute(source, environment={"COMPANION_PRESET": "other"}, progress=False)
    assert done.notebook.cells[1].outputs[0].text.startswith("other\n")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("fault, message", [
    ("raise ValueError('beta は正')", "セル 2/3「学習」: ValueError: beta は正"),
    ("import os; os._exit(3)", "セル 2/3「学習」: カーネルが止まりました"),
])  # fmt: skip
def test_a_failure_names_cell_and_error_and_keeps_what_ran(tmp_path, capsys, fault, message):
    path = tmp_path / "x.py"
    path.write_text(
        "# %%\nimport sys\nprint(1)\nprint('noise', file=sys.stderr)\n\n"
        f"# %% [markdown]\n# ## 学習\n\n# %%\n{fault}\n\n# %%\nprint(3)\n",
        encoding="utf-8")
    with pytest.raises(runner.NotebookFailure) as caught:
        runner.execute(path)
    assert message in str(caught.value)
    cells = [cell for cell in caught.value.notebook.cells if cell.cell_type == "code"]
    assert [output.text for output in cells[0].outputs] == ["1\n"] and not cells[2].outputs
    assert "execution" not in cells[0].metadata


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"nbformat": 4, "cells": 3}'])
def test_a_file_that_is_no_notebook_is_named(tmp_path, content):
    path = tmp_path / "x.ipynb"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(str(path))):
        runner.execute(path)


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no signal to one process")
def test_a_run_that_somebody_stops_ends_its_kernel(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("# %%\nimport os, pathlib, signal, time\n"
                    "pathlib.Path('pid').write_text(str(os.getpid()), encoding='utf-8')\n"
                    "os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(60)\n", encoding="utf-8")
    # In a process of its own: what nbclient leaves behind here would be reported in later tests.
    code = ("import pathlib, psutil; from companion import runner\n"
            "try:\n    runner.execute(pathlib.Path('x.py'), progress=False)\n"
            "except KeyboardInterrupt:\n"
            "    pid = int(pathlib.Path('pid').read_text(encoding='utf-8'))\n"
            "    print('stopped', psutil.pid_exists(pid))\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                          encoding="utf-8")
    assert done.stdout == "stopped False\n" and "Traceback" not in done.stderr


def test_notebook_and_page_are_written(source, tmp_path):
    done = runner.execute(source, preset="cpu", progress=False)
    notebook, page = runner.write(done.notebook, tmp_path / "y.ipynb", "4.5.1 DPO")
    assert nbformat.read(notebook, as_version=4).cells[1].outputs == done.notebook.cells[1].outputs
    html = page.read_text(encoding="utf-8")
    assert page.name == "y.html"
    assert "<title>4.5.1 DPO</title>" in html and 'lang="ja"' in html and "前" in html
    assert "require.min.js" not in html


def test_checkout_is_found_and_its_absence_explained(root, tmp_path, monkeypatch):
    assert runner.checkout() == root
    monkeypatch.setattr(runner, "__file__", str(tmp_path / "lib" / "companion" / "runner.py"))
    with pytest.raises(FileNotFoundError, match="pip install .* -e"):
        runner.checkout()
