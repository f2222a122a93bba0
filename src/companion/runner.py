"""Executing a notebook: live progress, what it cost, and a clean result."""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jupytext
import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from nbformat import NotebookNode

WIDGET = "application/vnd.jupyter.widget-view+json"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Execution:
    """An executed notebook and what it cost.

    Attributes:
        notebook: cleaned, see `clean`.
        dropped: what the cells wrote to stderr, one string a cell; the notebook is without it.
        seconds: wall time of the cells, the kernel's start not counted.
        cpu_seconds: the kernel's processor time, imports included.
        peak_bytes: the kernel's largest resident memory.
    """

    notebook: NotebookNode
    dropped: tuple[str, ...]
    seconds: float
    cpu_seconds: float
    peak_bytes: int


class NotebookFailure(RuntimeError):
    """A cell failed; says which and why, and keeps what ran until then in `notebook`."""

    def __init__(self, message: str, notebook: NotebookNode):
        super().__init__(message)
        self.notebook = notebook


def checkout() -> Path:
    """The checkout that this package is installed from, where `notebooks/` lies.

    Raises:
        FileNotFoundError: the package is not an editable install of a checkout.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "notebooks").is_dir() or not (root / "pyproject.toml").is_file():
        raise FileNotFoundError(
            "ノートブックが見つかりません。このパッケージはチェックアウトから編集可能な形で"
            "インストールしてください: pip install -c constraints.txt -e .\n"
            "(no notebooks/ beside the package: it needs an editable install of the checkout)"
        )
    return root


def execute(
    path: Path,
    *,
    folder: Path | None = None,
    preset: str | None = None,
    environment: Mapping[str, str] | None = None,
    progress: bool = True,
) -> Execution:
    """Execute a notebook, or a source in the percent format, from its first cell to its last.

    Args:
        path: .ipynb or .py; it is read, never written.
        folder: the kernel's working directory; without it, where `path` lies.
        preset: "cpu" or "gpu" for this run, in place of what the machine would pick.
        environment: variables for the kernel, over this process's own.
        progress: print a line for each code cell: count, section, seconds.

    Raises:
        OSError: `path` cannot be opened.
        ValueError: `path` holds no notebook.
        NotebookFailure: a cell raised, or the kernel died.
        KeyboardInterrupt: somebody stopped it; the kernel is ended.
    """
    try:
        notebook = jupytext.read(path)
    except OSError:
        raise
    except Exception as error:  # what it is depends on where the file stops being a notebook
        raise ValueError(
            f"{path} は、ノートブックとして読めません ({type(error).__name__})") from error
    variables = {**os.environ, **(environment or {})}
    if preset is not None:
        variables["COMPANION_PRESET"] = preset
    watch = _Watch(notebook, progress)
    client = NotebookClient(
        notebook,
        timeout=None,
        kernel_name="python3",
        shutdown_kernel="immediate",
        extra_arguments=["--log-level=ERROR"],  # no advice about transports in a reader's terminal
        resources={"metadata": {"path": str(folder or path.parent)}},
        on_cell_start=watch.start,
        on_cell_executed=watch.executed,
    )
    watch.kernel = lambda: client.km.provisioner.pid
    try:
        client.execute(env=variables)
    except CellExecutionError as error:
        reason = f"{error.ename}: {ANSI.sub('', error.evalue)}"
        clean(notebook)
        raise NotebookFailure(f"{watch.place}: {reason}", notebook) from None
    except (DeadKernelError, CellTimeoutError) as error:
        clean(notebook)
        raise NotebookFailure(
            f"{watch.place}: カーネルが止まりました ({type(error).__name__})", notebook
        ) from None
    except AssertionError:
        # On Ctrl-C nbclient ends its kernel, and then misses it.
        raise KeyboardInterrupt from None
    dropped = clean(notebook)
    return Execution(notebook, dropped, watch.seconds, watch.cpu_seconds, watch.peak_bytes)


def clean(notebook: NotebookNode) -> tuple[str, ...]:
    """Drop from an executed notebook, in place, what differs from run to run; return the stderr.

    Goes: widgets and their state, progress bars, stderr, time stamps, Python's patch version.
    Pieces of standard output that arrived apart are joined.
    """
    dropped = []
    notebook.metadata.pop("widgets", None)
    notebook.metadata.get("language_info", {}).pop("version", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        stderr = "".join(o.text for o in cell.outputs if o.get("name") == "stderr")
        if stderr:
            dropped.append(stderr)
        kept = []
        for output in cell.outputs:
            if output.get("name") == "stderr" or _is_widget(output):
                continue
            if kept and output.output_type == kept[-1].output_type == "stream":
                kept[-1].text += output.text
            else:
                kept.append(output)
        cell.outputs = kept
    return tuple(dropped)


def write(notebook: NotebookNode, path: Path, title: str) -> tuple[Path, Path]:
    """Write a notebook to `path` (.ipynb) and as a page beside it; return both paths.

    The page needs the network for its formulas only.
    """
    page = path.with_suffix(".html")
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8", newline="\n")
    # The template loads require.js for widgets, of which a clean notebook has none.
    exporter = HTMLExporter(language_code="ja", require_js_url="data:text/javascript,")
    body, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": title}})
    page.write_text(body, encoding="utf-8", newline="\n")
    return path, page


def _is_widget(output: NotebookNode) -> bool:
    data = output.get("data", {})
    return WIDGET in data or "<progress" in data.get("text/html", "")


class _Watch:
    """Follows a run: prints its progress and reads what the kernel has used."""

    def __init__(self, notebook: NotebookNode, progress: bool):
        self.code_cells = sum(cell.cell_type == "code" for cell in notebook.cells)
        self.progress = progress
        self.kernel = None  # -> the kernel's process id, known once it runs
        self.section, self.count, self.began = "", 0, 0.0
        self.seconds, self.cpu_seconds, self.peak_bytes = 0.0, 0.0, 0

    @property
    def place(self) -> str:
        return f"セル {self.count}/{self.code_cells}「{self.section}」"

    def start(self, cell: NotebookNode, cell_index: int) -> None:
        if cell.cell_type == "markdown":
            headings = re.findall(r"^#{1,2} +(.+)$", cell.source, re.MULTILINE)
            self.section = headings[-1].strip() if headings else self.section
        elif cell.cell_type == "code":
            self.count += 1
            self.began = time.perf_counter()
            if self.progress:
                print(f"[{self.count:>3}/{self.code_cells}] {self.section} … ", end="", flush=True)

    def executed(self, cell: NotebookNode, cell_index: int, execute_reply: dict) -> None:
        took = time.perf_counter() - self.began
        self.seconds += took
        try:
            self.cpu_seconds, self.peak_bytes = _used(self.kernel(), self.peak_bytes)
        except psutil.Error:
            pass  # it died at the end of this cell; nbclient says so
        if self.progress:
            done = "失敗" if execute_reply["content"]["status"] == "error" else f"{took:.1f} 秒"
            print(done, flush=True)


def _used(pid: int, peak: int) -> tuple[float, int]:
    """Processor seconds of a process so far, and its largest resident memory in bytes."""
    process = psutil.Process(pid)
    times, memory = process.cpu_times(), process.memory_info()
    status = Path(f"/proc/{pid}/status")
    if status.exists():  # Linux keeps the high-water mark; Windows too, by another name
        kib = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8"))
        peak = int(kib[1]) * 1024 if kib else peak
    else:
        peak = max(peak, getattr(memory, "peak_wset", memory.rss))
    return times.user + times.system, peak
