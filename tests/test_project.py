"""The project's own files agree with each other and with what is installed."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from rattler import MatchSpec

from companion.sections import SECTIONS

ROOT = Path(__file__).resolve().parents[1]

# torch is a range; these come with Python or with torch's own builds.
UNPINNED = re.compile(r"torch|triton|nvidia-.*|cuda-.*|pip|setuptools|companion")


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


PROJECT = tomllib.loads(text_of("pyproject.toml"))["project"]


@pytest.fixture(scope="module")
def files():
    """Every file that is part of the project."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True).stdout
    return [ROOT / name.decode() for name in listed.split(b"\0") if name]


@pytest.fixture(scope="module")
def constraints():
    pins = {}
    for line in text_of("constraints.txt").splitlines():
        line = line.split("#")[0].strip()
        if line:
            name, version = re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups()
            assert canonicalize_name(name) not in pins, f"{name} twice"
            pins[canonicalize_name(name)] = version
    return pins


# ---- what is installed, and from where it is said


def needed(name, extras, found):
    """All distributions that `name` needs here, itself included, into `found`."""
    key = canonicalize_name(name)
    if extras <= found.get(key, set()) and key in found:
        return
    found[key] = found.get(key, set()) | extras
    for line in metadata.requires(name) or []:
        requirement = Requirement(line)
        asked = any(
            requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            for extra in ({""} | extras)
        )
        if asked:
            needed(requirement.name, set(requirement.extras), found)


def test_constraints_hold_every_needed_distribution_at_its_installed_version(constraints):
    found = {}
    needed("companion", {"test"}, found)
    assert len(found) > 100
    wrong = {
        name: (constraints.get(name), metadata.version(name))
        for name in found
        if not UNPINNED.fullmatch(name) and constraints.get(name) != metadata.version(name)
    }
    assert not wrong, f"(constraints.txt, installed): {wrong}"


def test_constraints_leave_torch_free_and_pin_the_oracle(constraints):
    assert not [name for name in constraints if UNPINNED.fullmatch(name)]
    assert constraints["trl"] == "1.12.0"
    assert constraints["transformers"] == "5.24.0"
    assert constraints["nbgrader"] == "0.9.6"


def test_the_make_file_s_torch_is_in_the_tested_range():
    (torch,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch")
    assert torch.specifier == SpecifierSet(">=2.11,<2.15")
    pinned = Requirement(re.search(r"^TORCH \?= (.+)$", text_of("Makefile"), re.MULTILINE)[1])
    assert pinned.name == "torch"
    assert all(torch.specifier.contains(Version(pin.version)) for pin in pinned.specifier)


def test_dependencies_stand_in_pyproject_alone(files):
    others = {"setup.py", "setup.cfg", "Pipfile", "poetry.lock"}
    assert not [f for f in files if f.name in others or f.name.startswith("requirements")]
    names = [Requirement(line).name for line in PROJECT["dependencies"]]
    names += [Requirement(r).name for e in PROJECT["optional-dependencies"].values() for r in e]
    assert len(names) == len(set(names))
    assert [r for r in PROJECT["dependencies"] if Requirement(r).specifier] == [
        "torch>=2.11,<2.15"], "versions stand in constraints.txt"


def test_our_code_imports_only_what_pyproject_names():
    modules = {"IPython": "ipython", "matplotlib_fontja": "matplotlib-fontja", "yaml": "pyyaml",
               "matplotlib_inline": "matplotlib-inline"}
    named = {Requirement(line).name for line in PROJECT["dependencies"]}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                roots = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                roots = {node.module.split(".")[0]}
            else:
                continue
            for root in roots - sys.stdlib_module_names - {"companion"}:
                assert modules.get(root, root) in named, f"{path.name} imports {root}"


def test_conda_installs_this_project_with_the_constraints():
    environment = yaml.safe_load(text_of("environment.yml"))
    *conda, pip = environment["dependencies"]
    specs = {MatchSpec(line, strict=True).name.normalized: line for line in conda}
    assert set(specs) == {"python", "pip"}
    python = MatchSpec(specs["python"], strict=True).version
    assert SpecifierSet(str(python)) == SpecifierSet(PROJECT["requires-python"])
    assert pip == {"pip": ["-c constraints.txt", "-e .[test]"]}
    assert "test" in PROJECT["optional-dependencies"]


# ---- commands


def test_ci_runs_the_test_command_of_readme():
    script = ROOT / ".ci" / "run"
    assert os.name == "nt" or os.access(script, os.X_OK)
    lines = script.read_text(encoding="utf-8").splitlines()
    assert "set -euo pipefail" in lines and "make test" in lines
    assert "make test" in text_of("README.md")


def test_readme_has_the_commands_and_every_make_target_it_names():
    readme = text_of("README.md")
    for command in ("make", "make test", "environment.yml", "python -m companion",
                    "pip install -c constraints.txt", "constraints.txt", "RUNTIMES.md"):
        assert command in readme, command
    targets = set(re.findall(r"^([a-z]+):", text_of("Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", readme, re.MULTILINE))
    assert named <= targets


def test_readme_maps_every_section():
    readme = text_of("README.md")
    for section in SECTIONS:
        (row, *_) = [line for line in readme.splitlines()
                     if line.startswith("|") and section.number in line] or [""]
        assert section.trainer in row, section.number
        assert (f"notebooks/{section.notebook}" in row) == section.ready, section.number


@pytest.mark.skipif(os.name == "nt", reason="Windows has no make")
def test_make_refuses_another_python_and_leaves_no_stamp(tmp_path):
    (tmp_path / "Makefile").write_text(text_of("Makefile"), encoding="utf-8")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    old.chmod(0o755)
    for python in (old, "a-python-that-is-not-there"):
        done = subprocess.run(["make", "install", f"PYTHON={python}"], cwd=tmp_path,
                              capture_output=True, encoding="utf-8")
        assert done.returncode != 0
        assert not (tmp_path / ".venv").exists()


# ---- what the files hold


def test_no_file_names_the_machine_it_was_written_on(files):
    samples = {"test_notebooks.py", Path(__file__).name}  # they hold bad samples
    machine = re.compile(r"/(?:home|Users)/\w+/|" + "|".join(
        re.escape(f"{place}/") for place in {str(ROOT), str(Path.home()), sys.prefix}))
    for path in files:
        if path.name in samples or path.suffix in {".safetensors", ".png"} or not path.exists():
            continue
        found = machine.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.relative_to(ROOT)}: {found[0]}"


def test_nothing_of_ours_reads_or_writes_pickles():
    found = []
    for path in [p for folder in ("src", "tools", "tests", "notebooks") for p in
                 (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute | ast.Import | ast.ImportFrom):
                text = ast.unparse(node)
                if re.search(r"\btorch\.(load|save)$|pickle", text):
                    found.append(f"{path.name}: {text}")
    assert found == []


def test_every_file_of_ours_is_opened_with_its_encoding():
    openers = {"open", "read_text", "write_text"}
    for folder in ("src", "tools", "tests", "notebooks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name not in openers or ast.unparse(node.func) == "os.open":  # bytes, always
                    continue
                given = {keyword.arg for keyword in node.keywords}
                where = 0 if isinstance(node.func, ast.Attribute) else 1  # path.open, open
                binary = any(isinstance(a, ast.Constant) and "b" in str(a.value)
                             for a in node.args[where : where + 1])
                assert "encoding" in given or binary, f"{path.name}:{node.lineno}"


def test_the_licence_is_mit_by_the_authors():
    assert text_of("LICENSE").startswith("MIT License")
    assert "The companion's authors" in text_of("LICENSE")
    assert PROJECT["license"] == "MIT"
