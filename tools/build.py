"""Build the notebooks: notebooks/py/*.py, executed and cleaned, to notebooks/*.ipynb.

    python tools/build.py                 all of them
    python tools/build.py 4.5.1-dpo       that one
    python tools/build.py --check         build apart and compare with what stands in notebooks/

The build goes one way and always executes. On one machine a second build changes no byte;
what it measured goes to RUNTIMES.md alone.
"""

import argparse
import hashlib
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from companion import runner
from runtimes import machine, read_section, update_section

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"

# What the committed outputs are made with, whatever the machine would pick.
ENVIRONMENT = {
    "COMPANION_PRESET": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}

KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}

COLUMNS = ("ノートブック", "秒", "CPU 秒", "最大メモリ (MiB)", "測った環境")


def source_hash(source: Path) -> str:
    """sha256 of a notebook's source, the same whatever its line ends are on this machine."""
    return hashlib.sha256(source.read_text(encoding="utf-8").encode()).hexdigest()


def build(source: Path, folder: Path) -> tuple[str, runner.Execution]:
    """Execute one source in `folder` and return the text of its notebook, and what it cost.

    Raises:
        runner.NotebookFailure: a cell failed.
    """
    execution = runner.execute(source, folder=folder, environment=ENVIRONMENT)
    notebook = execution.notebook
    notebook.metadata = NotebookNode(
        kernelspec=KERNEL,
        language_info=notebook.metadata.language_info,
        companion={"source": f"py/{source.name}", "sha256": source_hash(source)},
    )
    _name_cells(notebook)
    return nbformat.writes(notebook, version=4) + "\n", execution


def _name_cells(notebook: NotebookNode) -> None:
    """Give each cell an id made of its content, so that an edit renames one cell only."""
    seen = {}
    for cell in notebook.cells:
        name = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[name] = seen.get(name, 0) + 1
        cell.id = name if seen[name] == 1 else f"{name}-{seen[name]}"


def record(name: str, execution: runner.Execution) -> None:
    """Put a notebook's figures into RUNTIMES.md, in place of its earlier ones."""
    runtimes = NOTEBOOKS.parent / "RUNTIMES.md"
    rows = {}
    for line in read_section("notebooks", runtimes).splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0]] = line
    figures = (
        name,
        f"{execution.seconds:.0f}",
        f"{execution.cpu_seconds:.0f}",
        f"{execution.peak_bytes / 2**20:.0f}",
        machine(),
    )
    rows[name] = f"| {' | '.join(figures)} |"
    head = [f"| {' | '.join(COLUMNS)} |", "|---|---:|---:|---:|---|"]
    update_section("notebooks", "\n".join(head + [rows[key] for key in sorted(rows)]), runtimes)


def main(arguments: list[str] | None = None) -> int:
    """Build or compare; 1 when a cell failed or a notebook differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="sources without .py; all when none is named")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args(arguments)

    known = {source.stem: source for source in sorted((NOTEBOOKS / "py").glob("*.py"))}
    for name in options.names:
        if name not in known:
            parser.error(f"no source {name!r} in notebooks/py, which has: {', '.join(known)}")
    failed = False
    for name in options.names or known:
        print(f"{name}", flush=True)
        try:
            text, execution = build(known[name], NOTEBOOKS)
        except runner.NotebookFailure as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
            continue
        for written in execution.dropped:
            if "Warning" in written:
                print(f"{name}: a cell wrote to stderr:\n{written}", file=sys.stderr)
        target = NOTEBOOKS / f"{name}.ipynb"
        if options.check:
            same = target.exists() and target.read_bytes() == text.encode()
            failed = failed or not same
            print(f"{name}: {'the same' if same else 'DIFFERS'}")
        else:
            target.write_text(text, encoding="utf-8", newline="\n")
            record(name, execution)
            print(f"{name}: {execution.seconds:.0f} s, {execution.peak_bytes / 2**20:.0f} MiB")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
