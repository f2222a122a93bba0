"""tools/build.py and tools/runtimes.py: the same source is the same bytes, figures stand apart."""

import nbformat
import pytest

import build
import runtimes
from companion.runner import Execution, NotebookFailure

SOURCE = """# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 題

# %% tags=["a"]
from matplotlib.figure import Figure
from matplotlib_inline.backend_inline import set_matplotlib_formats
set_matplotlib_formats("png")

# %%
figure = Figure(figsize=(2, 1))
figure.subplots().plot([3, 1, 2])
figure

# %%
print(1)

# %%
print(1)
"""


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """A checkout's notebooks folder with one source."""
    folder = tmp_path / "notebooks"
    (folder / "py").mkdir(parents=True)
    (folder / "py" / "x.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.setattr(build, "NOTEBOOKS", folder)
    return folder


def test_a_second_build_changes_no_byte_and_figures_go_to_runtimes_alone(notebooks, capsys):
    assert build.main([]) == 0
    first = (notebooks / "x.ipynb").read_bytes()
    assert build.main(["x"]) == 0
    assert (notebooks / "x.ipynb").read_bytes() == first
    assert b"\r" not in first

    table = runtimes.read_section("notebooks", notebooks.parent / "RUNTIMES.md").splitlines()
    assert len(table) == 3 and table[2].startswith("| x | ")
    assert {path.name for path in notebooks.parent.rglob("*") if path.is_file()} == {
        "x.py", "x.ipynb", "RUNTIMES.md"}

    assert build.main(["--check"]) == 0
    (notebooks / "x.ipynb").write_bytes(first.replace(b"print(1)", b"print(2)"))
    assert build.main(["--check"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_a_notebook_carries_its_source_s_hash_and_stable_ids(notebooks):
    build.main([])
    notebook = nbformat.read(notebooks / "x.ipynb", as_version=4)
    nbformat.validate(notebook)
    source = notebooks / "py" / "x.py"
    assert notebook.metadata.companion == {
        "source": "py/x.py", "sha256": build.source_hash(source)}
    assert notebook.metadata.kernelspec.name == "python3"
    assert "jupytext" not in notebook.metadata
    assert notebook.cells[1].metadata == {"tags": ["a"]}
    assert "image/png" in notebook.cells[2].outputs[0].data
    ids = [cell.id for cell in notebook.cells]
    assert ids[4] == f"{ids[3]}-2"

    changed = SOURCE.replace("# # 題", "# # 別の題")
    source.write_text(changed, encoding="utf-8")
    build.main([])
    again = nbformat.read(notebooks / "x.ipynb", as_version=4)
    assert [cell.id for cell in again.cells][1:] == ids[1:] and again.cells[0].id != ids[0]


def test_the_hash_does_not_depend_on_line_ends(tmp_path):
    (tmp_path / "a").write_bytes(b"# %%\n1\n")
    (tmp_path / "b").write_bytes(b"# %%\r\n1\r\n")
    assert build.source_hash(tmp_path / "a") == build.source_hash(tmp_path / "b")


def test_a_build_is_offline_on_the_cpu_preset_whatever_the_shell_says(notebooks, monkeypatch):
    monkeypatch.setenv("COMPANION_PRESET", "gpu")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    (notebooks / "py" / "x.py").write_text(
        "# %%\nimport os\nfor name in ('COMPANION_PRESET', 'HF_HUB_OFFLINE', "
        "'CUDA_VISIBLE_DEVICES', 'OMP_NUM_THREADS'):\n    print(name, repr(os.environ[name]))\n",
        encoding="utf-8")
    text, _ = build.build(notebooks / "py" / "x.py", notebooks)
    assert nbformat.reads(text, as_version=4).cells[0].outputs[0].text == (
        "COMPANION_PRESET 'cpu'\nHF_HUB_OFFLINE '1'\nCUDA_VISIBLE_DEVICES ''\n"
        "OMP_NUM_THREADS '1'\n")


def test_a_warning_of_a_cell_is_shown_to_who_builds(notebooks, capsys):
    (notebooks / "py" / "x.py").write_text(
        "# %%\nimport warnings\nwarnings.warn('β is large')\n", encoding="utf-8")
    assert build.main([]) == 0
    assert "x: a cell wrote to stderr" in (err := capsys.readouterr().err) and "β is large" in err
    assert "β is large" not in str(nbformat.read(notebooks / "x.ipynb", 4).cells[0].outputs)


def test_figures_are_recorded_in_place_of_that_notebook_s_earlier_ones(notebooks):
    for name, seconds in ("b", 3.0), ("a", 5.0), ("b", 11.0):
        build.record(name, Execution(nbformat.v4.new_notebook(), (), seconds, seconds + 1, 2**30))
    table = runtimes.read_section("notebooks", notebooks.parent / "RUNTIMES.md").splitlines()
    assert table[0].startswith("| ノートブック | 秒 | CPU 秒 | 最大メモリ (MiB) |")
    assert [row.split(" | ")[:4] for row in table[2:]] == [
        ["| a", "5", "6", "1024"], ["| b", "11", "12", "1024"]]


def test_a_failing_cell_leaves_the_built_notebook_as_it_was(notebooks, capsys):
    (notebooks / "x.ipynb").write_text("before", encoding="utf-8")
    (notebooks / "py" / "x.py").write_text("# %%\n1 / 0\n", encoding="utf-8")
    assert build.main([]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert (notebooks / "x.ipynb").read_text(encoding="utf-8") == "before"
    with pytest.raises(NotebookFailure):
        build.build(notebooks / "py" / "x.py", notebooks)


def test_a_name_without_a_source_is_refused(notebooks, capsys):
    with pytest.raises(SystemExit):
        build.main(["y"])
    assert "which has: x" in capsys.readouterr().err


def test_sections_of_runtimes_are_replaced_apart(tmp_path):
    path = tmp_path / "RUNTIMES.md"
    runtimes.update_section("matrix", "| old |", path)
    runtimes.update_section("notebooks", "| n |", path)
    runtimes.update_section("matrix", "| new |", path)
    assert runtimes.read_section("matrix", path) == "| new |"
    assert runtimes.read_section("notebooks", path) == "| n |"
    text = path.read_text(encoding="utf-8")
    assert "old" not in text and text.count("## ") == 2
    with pytest.raises(ValueError, match="'x' is not one of"):
        runtimes.update_section("x", "", path)


def test_the_machine_is_described_without_its_name():
    import platform

    described = runtimes.machine()
    assert platform.node() not in described and "cores" in described and "trl 1." in described
