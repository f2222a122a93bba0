"""Run the parity tests against several TRL releases and tabulate the largest differences.

    python tools/matrix.py                          the installed release and 1.8.0, 1.14.2, 1.16.0
    python tools/matrix.py --releases 1.16.0        one other release
    python tools/matrix.py --write                  and put the table into RUNTIMES.md

TRL alone is swapped: each release is installed without its dependencies into a folder of its own
in build/, which PYTHONPATH puts before the environment's.
"""

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from importlib import metadata
from pathlib import Path

from runtimes import read_section, update_section

ROOT = Path(__file__).resolve().parent.parent
OVERLAYS = ROOT / "build" / "overlays"
RELEASES = ("1.8.0", "1.14.2", "1.16.0")


def overlay(release: str) -> Path:
    """The folder that holds this TRL release alone, installed on first use.

    Raises:
        SystemExit: pip cannot install it.
    """
    folder = OVERLAYS / f"trl-{release}"
    if not (folder / f"trl-{release}.dist-info").exists():
        installing = subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade",
             "--target", str(folder), f"trl=={release}"],
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if installing.returncode:
            raise SystemExit(f"TRL {release} cannot be installed")
    return folder


def run_parity(release: str, folder: Path | None) -> dict[tuple[str, str], float]:
    """Run tests/parity under a release.

    Returns:
        (quantity, dtype) -> the largest difference that a test recorded.

    Raises:
        SystemExit: a parity test failed, or another release was imported than asked for.
    """
    environment = dict(os.environ, HF_HUB_OFFLINE="1")
    if folder is not None:
        environment["PYTHONPATH"] = str(folder)
    imported = subprocess.run(
        [sys.executable, "-c", "import trl; print(trl.__version__)"],
        env=environment, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8",
    ).stdout.strip()  # fmt: skip
    if imported != release:
        raise SystemExit(f"TRL {release} was asked for, but {imported or 'none'} is imported")
    report = ROOT / "build" / f"parity-trl-{release}.xml"
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/parity", f"--junitxml={report}"],
        env=environment, cwd=ROOT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if tests.returncode:
        raise SystemExit(f"parity fails under TRL {release}")
    return read_report(report)


def read_report(report: Path) -> dict[tuple[str, str], float]:
    """The largest recorded difference per (method's quantity, dtype) of a JUnit report."""
    largest: dict[tuple[str, str], float] = defaultdict(float)
    for case in ET.parse(report).getroot().iter("testcase"):
        dtype = "float64" if "float64" in case.attrib["name"] else "float32"
        for item in case.iter("property"):
            key = item.attrib["name"], dtype
            largest[key] = max(largest[key], float(item.attrib["value"]))
    if not largest:
        raise SystemExit(f"{report.name} records no difference")
    return dict(largest)


def table(results: dict[str, dict[tuple[str, str], float]]) -> str:
    """A Markdown table, one row a quantity, one column a release."""
    quantities = sorted({key for differences in results.values() for key in differences},
                        key=lambda key: (key[0], key[1] != "float64"))
    lines = [["最大差 / largest difference", *(f"TRL {release}" for release in results)],
             ["---"] * (len(results) + 1)]
    for key in quantities:
        cells = (f"{found[key]:.0e}" if key in found else "–" for found in results.values())
        lines.append([f"{key[0]}, {key[1]}", *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _rows(markdown: str) -> set[str]:
    return {line.split(" | ")[0] for line in markdown.splitlines()[2:]}


def main(arguments: list[str] | None = None) -> None:
    """Run and tabulate; a SystemExit says what went wrong, or that RUNTIMES.md is out of date."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--releases", nargs="+", metavar="X.Y.Z",
                        help="only these, each by overlay (default: installed and "
                        + ", ".join(RELEASES) + ")")
    parser.add_argument("--write", action="store_true", help="put the table into RUNTIMES.md")
    options = parser.parse_args(arguments)
    (ROOT / "build").mkdir(exist_ok=True)

    installed = metadata.version("trl")
    results = {}
    for release in options.releases or (installed, *RELEASES):
        print(f"== parity under TRL {release}", flush=True)
        own = release == installed
        results[release] = run_parity(release, None if own else overlay(release))
    written = table(results)
    print(written)
    if options.write:
        update_section("matrix", written)
    # A release may lack what it cannot run: PPO left TRL with 1.13.0.
    elif not _rows(written) <= _rows(read_section("matrix")):
        raise SystemExit("RUNTIMES.md lacks rows: run python tools/matrix.py --write")


if __name__ == "__main__":
    main()
