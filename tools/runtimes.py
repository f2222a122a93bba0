"""RUNTIMES.md: named sections between markers, each rewritten by the tool that measures it."""

import os
import platform
import re
from importlib import metadata
from pathlib import Path

import psutil

RUNTIMES = Path(__file__).parents[1] / "RUNTIMES.md"

HEAD = """# 実行時間 / Run times

生成されるファイルです。手で書き換えないでください。This file is generated; do not edit it by hand.
"""

TITLES = {
    "notebooks": "ノートブック / Notebooks (`tools/build.py`)",
    "matrix": "TRL の版ごとの照合 / Version matrix (`tools/matrix.py`)",
    "bench": "速さ / Speed (`tools/bench.py`)",
}


def update_section(name: str, body: str, path: Path = RUNTIMES) -> None:
    """Replace the body of one section of RUNTIMES.md, or add the section at the end.

    Args:
        name: a key of TITLES.
        body: markdown without a heading.

    Raises:
        ValueError: an unknown name.
    """
    if name not in TITLES:
        raise ValueError(f"name {name!r} is not one of: {', '.join(TITLES)}")
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    section = f"{begin}\n{body.strip()}\n{end}"
    text = path.read_text(encoding="utf-8") if path.exists() else HEAD
    if begin in text:
        head, rest = text.split(begin, 1)
        text = head + section + rest.split(end, 1)[1]
    else:
        text = f"{text.rstrip()}\n\n## {TITLES[name]}\n\n{section}\n"
    path.write_text(text, encoding="utf-8", newline="\n")


def read_section(name: str, path: Path = RUNTIMES) -> str:
    """The body of one section, "" where there is none."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.search(f"<!-- {name}: begin -->\n(.*?)\n<!-- {name}: end -->", text, re.DOTALL)
    return found[1] if found else ""


def machine() -> str:
    """The machine and the versions that a figure was measured with, on one line, no host name."""
    memory = psutil.virtual_memory().total / 2**30
    packages = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "trl"))
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, "
        f"Python {platform.python_version()}, {packages}"
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*: (.+)$", info.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()
