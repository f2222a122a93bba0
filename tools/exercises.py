"""Build the exercises: solution source (notebooks/exercises/py/*.py) -> student notebook.

The sources are jupytext percent scripts with nbgrader's cell metadata. Solutions and hidden tests
are cut here with nbgrader's own markers and rules, so that neither authors nor students need
nbgrader; a lecturer who has it gets the instructor's notebook with --course.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

from build import KERNEL, source_hash

EXERCISES = Path(__file__).resolve().parents[1] / "notebooks" / "exercises"
SOURCES = EXERCISES / "py"
CONFIG = EXERCISES / "nbgrader_config.json"

MARKERS = {
    "solution": ("### BEGIN SOLUTION", "### END SOLUTION"),
    "hidden tests": ("### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS"),
}


def instructor_notebook(source: Path) -> NotebookNode:
    """The whole exercise with its solutions and hidden tests: what goes into nbgrader's source/.

    Cell ids are nbgrader's grade ids, or the position for cells without one; the metadata holds
    the SHA-256 of the source.

    Raises:
        ValueError: a grade id stands twice.
    """
    notebook = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    grade_ids = [grader(cell)["grade_id"] for cell in notebook.cells if grader(cell)]
    for grade_id in grade_ids:
        if grade_ids.count(grade_id) > 1:
            raise ValueError(f"{source.name}: the grade id {grade_id!r} stands more than once")

    for position, cell in enumerate(notebook.cells):
        meta = grader(cell)
        cell.id = meta.get("grade_id", f"cell-{position:02d}")
        if meta:
            # As nbgrader does on release: JupyterLab then keeps what a student must not change.
            cell.metadata["deletable"] = False
            if not meta["solution"]:
                cell.metadata["editable"] = False
    notebook.metadata = NotebookNode(
        kernelspec=KERNEL,
        language_info={"name": "python"},
        companion={"source": f"py/{source.name}", "sha256": source_hash(source)},
    )
    # The first minor version with cell ids; jupytext leaves it lower.
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def student_notebook(source: Path, code_stub: str, text_stub: str) -> NotebookNode:
    """The exercise as a student gets it: solutions replaced by the stub, hidden tests cut out.

    Raises:
        ValueError: a region is nested, not closed, or in a cell not marked for it.
    """
    notebook = instructor_notebook(source)
    for cell in notebook.cells:
        meta, where = grader(cell), f"{source.name}, cell {cell.id}"
        stub = code_stub if cell.cell_type == "code" else text_stub
        visible, had_solution = _cut(cell.source, "solution", stub, where)
        visible, had_hidden = _cut(visible, "hidden tests", None, where)
        if had_solution and not meta.get("solution"):
            raise ValueError(f"{where}: a solution region in a cell that is no solution")
        if had_hidden and not meta.get("grade"):
            raise ValueError(f"{where}: hidden tests in a cell that is not graded")
        if meta.get("solution") and not had_solution:
            visible = stub  # no region marked: the whole cell is the solution
        cell.source = visible
    return notebook


def as_text(notebook: NotebookNode) -> str:
    """The notebook's file, the same characters for the same notebook."""
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def grader(cell: NotebookNode) -> dict:
    """A cell's nbgrader metadata, empty where it has none."""
    return cell.metadata.get("nbgrader", {})


def _cut(source: str, region: str, stub: str | None, where: str) -> tuple[str, bool]:
    begin, end = MARKERS[region]
    lines, inside, found = [], False, False
    for line in source.split("\n"):
        if begin in line:
            if inside:
                raise ValueError(f"{where}: {begin!r} inside another one")
            inside = found = True
            if stub is not None:
                indent = line[: len(line) - len(line.lstrip())]
                lines += [indent + part for part in stub.split("\n")]
        elif end in line:
            if not inside:
                raise ValueError(f"{where}: {end!r} without its beginning")
            inside = False
        elif not inside:
            lines.append(line)
    if inside:
        raise ValueError(f"{where}: {begin!r} is never closed")
    return "\n".join(lines), found


def stubs() -> dict[str, str]:
    """What stands in a solution's place; nbgrader reads the same file."""
    config = json.loads(CONFIG.read_text(encoding="utf-8"))["ClearSolutions"]
    return {"code_stub": config["code_stub"]["python"], "text_stub": config["text_stub"]}


def build(sources: list[Path]) -> Iterator[tuple[Path, str]]:
    """Each student notebook's path and text."""
    for source in sources:
        yield (
            source.parent.parent / f"{source.stem}.ipynb",
            as_text(student_notebook(source, **stubs())),
        )


def fill_course(course: Path, sources: list[Path]) -> None:
    """Put the instructor's notebooks into an nbgrader course, ready for generate_assignment."""
    for source in sources:
        assignment = course / "source" / source.stem
        assignment.mkdir(parents=True, exist_ok=True)
        path = assignment / f"{source.stem}.ipynb"
        path.write_text(as_text(instructor_notebook(source)), encoding="utf-8", newline="\n")
        print(f"wrote {path}")
    if (course / CONFIG.name).exists():
        print(f"kept  {course / CONFIG.name}")
    else:
        shutil.copyfile(CONFIG, course / CONFIG.name)
        print(f"wrote {course / CONFIG.name}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Build the student notebooks in notebooks/exercises from their sources."
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check", action="store_true", help="write nothing; fail when a notebook is out of date"
    )
    mode.add_argument(
        "--course", type=Path, metavar="DIR",
        help="write the notebooks with solutions to DIR/source, an nbgrader course",
    )
    options = parser.parse_args(arguments)

    sources = sorted(SOURCES.glob("*.py"))
    if options.course:
        fill_course(options.course, sources)
        return 0

    stale = []
    for path, text in build(sources):
        if options.check:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale.append(path.name)
        else:
            path.write_text(text, encoding="utf-8", newline="\n")
            print(f"wrote notebooks/exercises/{path.name}")
    for name in stale:
        print(f"notebooks/exercises/{name} is out of date: run python tools/exercises.py",
              file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
