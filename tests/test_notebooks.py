"""The notebooks as text: their outputs are theirs, their keywords exist, their prose renders.

Each checker returns complaints, and has a bad sample of its own below: a checker that cannot
complain would be worth nothing.
"""

import ast
import importlib
import inspect
import re
import statistics
import unicodedata
from pathlib import Path
from urllib.parse import unquote

import jupytext
import pytest
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from nbformat.v4 import new_code_cell, new_notebook, new_output

from build import source_hash
from companion.sections import SECTIONS

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SOURCES = sorted((FOLDER / "py").glob("*.py"))
EXERCISES = sorted((FOLDER / "exercises").glob("*.ipynb"))

# It orients the reader: no section of the book, and not made of a section's parts.
FIRST_PAGE = "0-はじめに.ipynb"

PARTS = ("記号", "導出", "実装", "TRL との照合", "学習", "実験", "演習", "参考文献")
TABLE = ["記号", "変数", "形状", "TRL での名前"]
ASSERTIONS = {"claim", "check", "assert_close", "assert_allclose"}

MARKDOWN = MarkdownIt("commonmark").enable("table")
MARKDOWN.use(dollarmath_plugin, allow_space=False, double_inline=True)


# ---- checkers


def outputs_complaints(notebook, source: Path) -> list[str]:
    """The outputs were made by this source."""
    stored = notebook.metadata.get("companion", {}).get("sha256")
    return [] if stored == source_hash(source) else [
        f"the outputs are of another text of {source.name}: run python tools/build.py {source.stem}"
    ]


def keyword_complaints(code: str) -> list[str]:
    """Every keyword that the code gives to a Config or Trainer of TRL exists in this release."""
    tree = ast.parse(code)
    classes, complaints = {}, []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "trl":
            continue
        module = importlib.import_module(node.module)
        for alias in node.names:
            if not alias.name.endswith(("Config", "Trainer")):
                continue
            if hasattr(module, alias.name):
                classes[alias.asname or alias.name] = getattr(module, alias.name)
            else:
                complaints.append(f"{node.module} has no {alias.name}")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id not in classes:
            continue
        known = inspect.signature(classes[node.func.id]).parameters.values()
        named = {p.name for p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        complaints += [f"{node.func.id} has no {keyword.arg!r}" for keyword in node.keywords
                       if keyword.arg is not None and keyword.arg not in named]
    return complaints


def markdown_complaints(text: str) -> list[str]:
    """The text renders alike in JupyterLab and on GitHub."""
    complaints = []
    if "\\operatorname" in text:
        complaints.append("GitHub refuses \\operatorname: write \\mathrm")
    if re.search(r"^\([\w-]+\)=$|^[`:]{3,}\{", text, re.MULTILINE):
        complaints.append("MyST's own syntax does not render in a notebook")
    for block in MARKDOWN.parse(text):
        pieces = block.children or []
        for at, piece in enumerate(pieces):
            if piece.type == "text":
                for mark in ("**", "$"):
                    if mark in piece.content:
                        complaints.append(f"{mark} is left over in: {piece.content}")
            elif piece.type == "math_inline":
                before = pieces[at - 1].content[-1:] if at else ""
                after = pieces[at + 1].content[:1] if at + 1 < len(pieces) else ""
                # GitHub starts a formula after a space or ASCII punctuation only.
                if before and not (before.isspace() or before.isascii() and not before.isalnum()):
                    complaints.append(f"no space before ${piece.content}$")
                if after and (after.isalnum() or unicodedata.category(after)[0] == "S"):
                    complaints.append(f"no space after ${piece.content}$")
    return complaints


def link_complaints(text: str, folder: Path) -> list[str]:
    """Links to files lead somewhere."""
    complaints = []
    for block in MARKDOWN.parse(text):
        for piece in block.children or []:
            target = piece.attrs.get("href") or piece.attrs.get("src")
            if not target or re.match(r"[a-z]+:|#", target):
                continue
            if not (folder / unquote(target).split("#")[0]).exists():
                complaints.append(f"broken link: {target}")
    return complaints


def stored_complaints(notebook) -> list[str]:
    """All cells ran, in order, and show nothing that is only of the machine that ran them."""
    complaints = []
    if "widgets" in notebook.metadata or "version" in notebook.metadata.get("language_info", {}):
        complaints.append("metadata of one run")
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        complaints.append("not every cell ran in order")
    for output in (output for cell in code for output in cell.outputs):
        if output.output_type == "error":
            complaints.append(f"an error: {output.ename}")
        if output.get("name") == "stderr":
            complaints.append(f"stderr: {output.text}")
        texts = [output.get("text", "")]
        texts += [data for kind, data in output.get("data", {}).items() if kind.startswith("text")]
        for text in texts:
            for word in ("Warning", "Traceback", "site-packages"):
                if word in text:
                    complaints.append(f"{word} in: {text}")
            for pattern, name in (
                (r"(?<![\w/.:<])/[A-Za-z_][\w.-]*/[\w.-]+|\b[A-Za-z]:\\\w", "an absolute path"),
                (r"\b0x[0-9a-f]{6,}", "an address"),
            ):
                if re.search(pattern, text):
                    complaints.append(f"{name} in: {text}")
    return complaints


def kernel_complaints(notebook) -> list[str]:
    """Every machine has the kernel."""
    name = notebook.metadata.get("kernelspec", {}).get("name")
    return [] if name == "python3" else [f"kernelspec is {name!r}, not 'python3'"]


def width_complaints(cells) -> list[str]:
    """Code lines fit a page."""
    complaints = []
    for line in (line for cell in cells for line in cell.source.splitlines()):
        columns = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)
        if columns > 78:
            complaints.append(f"{columns} columns: {line}")
    return complaints


def length_complaints(cells, median: int = 7) -> list[str]:
    """One idea a cell."""
    lengths = [sum(bool(line.strip()) for line in cell.source.splitlines()) for cell in cells]
    complaints = [f"a cell of {n} lines: {cell.source[:60]}"
                  for n, cell in zip(lengths, cells, strict=True) if n > 25]
    if statistics.median(lengths) > median:
        complaints.append(f"the median cell has {statistics.median(lengths)} lines")
    return complaints


def parts_complaints(text: str) -> list[str]:
    """Title and the eight parts after it, in order; the table of symbols comes first."""
    blocks = MARKDOWN.parse(text)
    complaints, headings = [], []
    for at, block in enumerate(blocks):
        if block.type == "heading_open":
            headings.append((block.tag, blocks[at + 1].content))
    if [tag for tag, _ in headings[:1]] != ["h1"] or sum(tag == "h1" for tag, _ in headings) != 1:
        complaints.append("a notebook begins with its one title")
    found = [title for tag, title in headings if tag == "h2"]
    if len(found) != len(PARTS) or any(p not in f for p, f in zip(PARTS, found, strict=False)):
        complaints.append(f"the parts are {found}, not {list(PARTS)}")
    ends = [at for at, block in enumerate(blocks) if block.type == "tr_close"]
    row = [block.content for block in blocks[:ends[0]] if block.type == "inline"] if ends else []
    if row[-4:] != TABLE:
        complaints.append(f"the first table is not {' | '.join(TABLE)}")
    return complaints


def assertions(code: str) -> int:
    """How many statements of the code can fail it."""
    return sum(
        isinstance(node, ast.Assert)
        or isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) in ASSERTIONS
        for node in ast.walk(ast.parse(code))
    )


# ---- the notebooks


def source_of(path):
    return path.parent / "py" / f"{path.stem}.py"


def code_cells(path):
    return [cell for cell in jupytext.read(path).cells if cell.cell_type == "code"]


def prose(path):
    return [cell.source for cell in jupytext.read(path).cells if cell.cell_type == "markdown"]


def name(path):
    return f"{path.parent.name}-{path.stem}" if path.parent.name == "exercises" else path.stem


each_built = pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
each_source = pytest.mark.parametrize("path", SOURCES, ids=name)
each_section = pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.stem != Path(FIRST_PAGE).stem], ids=name)
each_text = pytest.mark.parametrize("path", [*SOURCES, *EXERCISES], ids=name)


def test_every_source_is_built_and_every_ready_section_has_its_notebook():
    assert {path.stem for path in NOTEBOOKS} == {path.stem for path in SOURCES}
    ready = {section.notebook for section in SECTIONS if section.ready}
    assert {path.name for path in NOTEBOOKS} == ready | {FIRST_PAGE}


@each_built
def test_outputs_belong_to_the_source(path):
    assert not outputs_complaints(jupytext.read(path), source_of(path))


@each_built
def test_cells_are_those_of_the_source(path):
    built, source = jupytext.read(path), jupytext.read(source_of(path))
    assert [(cell.cell_type, cell.source) for cell in built.cells] == [
        (cell.cell_type, cell.source) for cell in source.cells]


@each_built
def test_outputs_are_clean(path):
    assert not stored_complaints(jupytext.read(path))


@each_source
def test_keywords_exist_in_the_installed_release(path):
    assert not keyword_complaints(path.read_text(encoding="utf-8"))


@each_source
def test_cells_are_short(path):
    assert not length_complaints(code_cells(path))


@pytest.mark.parametrize("path", EXERCISES, ids=name)
def test_cells_of_exercises_are_not_long(path):
    assert not length_complaints(code_cells(path), median=25)  # half of them are tests


@each_source
def test_code_fits_78_columns(path):
    assert not width_complaints(code_cells(path))


@each_section
def test_nine_parts_stand_in_order(path):
    assert not parts_complaints("\n\n".join(prose(path)))


@each_section
def test_a_notebook_asserts_what_it_says(path):
    assert assertions(path.read_text(encoding="utf-8")) >= 8


def test_the_first_page_leads_to_every_ready_section():
    text = (FOLDER / "py" / f"{Path(FIRST_PAGE).stem}.py").read_text(encoding="utf-8")
    for section in SECTIONS:
        assert (f"]({section.notebook})" in text) == section.ready, section.number


@each_text
def test_prose_renders(path):
    assert not [complaint for text in prose(path) for complaint in markdown_complaints(text)]


@each_text
def test_links_lead_somewhere(path):
    # from where the built notebook lies
    folder = path.parent if path.suffix == ".ipynb" else path.parents[1]
    assert not [complaint for text in prose(path) for complaint in link_complaints(text, folder)]


@pytest.mark.parametrize("path", [*NOTEBOOKS, *EXERCISES], ids=name)
def test_kernel_is_python3(path):
    assert not kernel_complaints(jupytext.read(path))


# ---- the checkers themselves


def test_outputs_of_another_text_are_found(tmp_path):
    source = tmp_path / "x.py"
    source.write_text("# %%\n1\n", encoding="utf-8")
    notebook = new_notebook(metadata={"companion": {"sha256": source_hash(source)}})
    assert not outputs_complaints(notebook, source)
    source.write_text("# %%\n2\n", encoding="utf-8")
    assert outputs_complaints(notebook, source)
    assert outputs_complaints(new_notebook(), source)


GOOD_CALL = "from trl import DPOConfig, DPOTrainer\nDPOTrainer(model=1, args=DPOConfig(beta=1))"


@pytest.mark.parametrize("code, complaint", [
    (GOOD_CALL, None),
    (GOOD_CALL.replace("beta", "betta"), "DPOConfig has no 'betta'"),
    (GOOD_CALL.replace("model=", "modell="), "DPOTrainer has no 'modell'"),
    ("from trl import DPOConfig as C\nC(bettta=1)", "C has no 'bettta'"),
    ("from trl import DPPOConfig", "trl has no DPPOConfig"),
    ("from trl.experimental.ppo import PPOConfig\nPPOConfig(kl_coeff=1)", "no 'kl_coeff'"),
    ("def DPOConfig(x): ...\nDPOConfig(x=1)", None),
])  # fmt: skip
def test_unknown_keywords_are_found(code, complaint):
    found = keyword_complaints(code)
    assert (len(found) == 1 and complaint in found[0]) if complaint else not found


@pytest.mark.parametrize("text", [
    "**報酬** です。**方策**、「**報酬**」です",
    "係数 $\\beta$ は、方策 $\\pi^*$、$$J(\\pi) \\tag{4.9}$$",
    "関数（ $x$ ）と ($y$) と $x$。",
    "`**` と `$HOME` は式ではありません",
    "| a | b |\n|---|---|\n| $x$ | $\\pi(y\\mid x)$ |",
    "```python\nx ** 2  # $\n```",
])  # fmt: skip
def test_good_prose_passes(text):
    assert not markdown_complaints(text)


@pytest.mark.parametrize("text", [
    "**「報酬」**です",
    "これは**KL（情報量）**は",
    "$\\operatorname{clip}(x)$",
    "係数$\\beta$ は",
    "係数 $\\beta$は",
    "（$\\beta$ の値）",
    "、$\\beta$ の値",
    "係数 $ \\beta $ は",
    "| a |\n|---|\n| $\\pi(y|x)$ |",
    "(label)=",
    "```{note}\nx\n```",
    ":::{note}\nx\n:::",
])  # fmt: skip
def test_prose_that_does_not_render_is_found(text):
    assert markdown_complaints(text)


def test_broken_links_are_found(tmp_path):
    (tmp_path / "あ b.md").touch()
    good = "[a](%E3%81%82%20b.md#x) [b](https://example.org) [c](#here) [d](.)"
    assert not link_complaints(good, tmp_path)
    assert link_complaints("[a](gone.md)", tmp_path) == ["broken link: gone.md"]
    assert link_complaints("![a](gone.png)", tmp_path)


def ran(*outputs, count=1):
    return new_notebook(cells=[new_code_cell("1", execution_count=count, outputs=list(outputs))])


def shown(text, kind="text/plain"):
    return new_output("display_data", {kind: text})


@pytest.mark.parametrize("notebook", [
    ran(shown("logps/chosen/x 3/4 https://example.org/a/b")),
    ran(shown("<div>\n<table><td>rewards/chosen</td></table></div>", "text/html")),
    ran(new_output("stream", text="✓ 差 1e-13")),
])  # fmt: skip
def test_good_outputs_pass(notebook):
    assert not stored_complaints(notebook)


@pytest.mark.parametrize("notebook", [
    ran(count=None),
    ran(count=7),
    ran(new_output("error", ename="ValueError", evalue="", traceback=[])),
    ran(new_output("stream", name="stderr", text="hm")),
    ran(new_output("stream", text="FutureWarning: x")),
    ran(shown("Traceback (most recent call last)")),
    ran(shown("lib/site-packages/x")),
    ran(shown("written to /home/me/x")),
    ran(shown("<td>/tmp/abc/x</td>", "text/html")),
    ran(shown("C:\\Users")),
    ran(shown("<Line at 0x7f00aa11bb>")),
    new_notebook(metadata={"widgets": {}}),
    new_notebook(metadata={"language_info": {"name": "python", "version": "3.11.2"}}),
])  # fmt: skip
def test_bad_outputs_are_found(notebook):
    assert stored_complaints(notebook)


def test_another_kernel_is_found():
    kernelspec = {"name": "python3", "display_name": "Python 3"}
    assert not kernel_complaints(new_notebook(metadata={"kernelspec": kernelspec}))
    assert kernel_complaints(new_notebook(metadata={"kernelspec": kernelspec | {"name": "venv"}}))
    assert kernel_complaints(new_notebook())


def test_wide_lines_and_long_cells_are_found():
    assert not width_complaints([new_code_cell("x" * 78)])
    assert width_complaints([new_code_cell("x" * 79)])
    assert width_complaints([new_code_cell("# " + "あ" * 39)])
    short, long = new_code_cell("1\n" * 7), new_code_cell("1\n\n" * 26)
    assert not length_complaints([short, new_code_cell("1\n" * 25), short])
    assert length_complaints([short, long, short]) == ["a cell of 26 lines: " + long.source[:60]]
    assert length_complaints([new_code_cell("1\n" * 8)])


def test_parts_out_of_order_are_found():
    parts = [f"## {number}. {part}" for number, part in enumerate(PARTS, 2)]
    table = "| " + " | ".join(TABLE) + " |\n|---|---|---|---|\n| x | y | – | – |"
    good = ["# 題", parts[0], table, *parts[1:]]
    assert not parts_complaints("\n\n".join(good))
    assert parts_complaints("\n\n".join(good[1:]))
    assert parts_complaints("\n\n".join(["# 題", *good]))
    assert parts_complaints("\n\n".join(good[:-1]))
    assert parts_complaints("\n\n".join([*good, "## おまけ"]))
    assert parts_complaints("\n\n".join([*good[:3], parts[2], parts[1], *parts[3:]]))
    assert parts_complaints("\n\n".join(good).replace("形状", "形"))
    assert parts_complaints("\n\n".join(["# 題", *parts]))


def test_assertions_are_counted():
    code = "assert 1\nclaim('a', 1, 1)\ntorch.testing.assert_close(1, 1)\nprint(1)\nclaim\n"
    assert assertions(code) == 3
