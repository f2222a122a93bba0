"""nbgrader grades a right, a wrong and an empty submission, as it would in a course.

Run apart: pytest -m classroom tests/classroom (with the classroom extra).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import exercises

pytestmark = pytest.mark.classroom
nbgrader = pytest.importorskip("nbgrader", reason="needs the classroom extra: nbgrader")

SECTION = "4.5.1-dpo"
SOURCE = exercises.SOURCES / f"{SECTION}.py"

# A usual first try: the reference left out, sigma and log apart, and a prediction of the wrong
# probability. The rest is the solution.
WRONG = {
    "dpo_loss": """
def dpo_loss(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta):
    return -torch.log(torch.sigmoid(beta * (chosen_logps - rejected_logps))).mean()
""",
    "predictions": "predicted_gap, predicted_prob = 2.0, 0.731",
    "explanation": "確率が下がるからです。",
}
LOST = {
    "test_value", "test_batch", "test_gradient", "test_stability",
    "test_predicted_prob",
    "test_trained_policy",  # trains with the loss above
}
ANOTHER_RIGHT_LOSS = """
def dpo_loss(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta):
    references = (ref_chosen_logps - ref_rejected_logps).detach()
    margin = beta * (chosen_logps - rejected_logps - references)
    return torch.logaddexp(torch.zeros_like(margin), -margin).mean()
"""


def submission(answers):
    """The student's notebook with the answers, by cell, filled in."""
    notebook = exercises.student_notebook(SOURCE, **exercises.stubs())
    for cell in notebook.cells:
        cell.source = answers.get(cell.id, cell.source)
    return notebook


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A course in which three students have been graded."""
    root = tmp_path_factory.mktemp("course")
    exercises.main(["--course", str(root)])

    solutions = {
        cell.id: cell.source
        for cell in exercises.instructor_notebook(SOURCE).cells
        if exercises.grader(cell).get("solution")
    }
    for student, answers in {
        "right": solutions | {"dpo_loss": ANOTHER_RIGHT_LOSS},
        "wrong": solutions | WRONG,
        "empty": {},
    }.items():
        folder = root / "submitted" / student / SECTION
        folder.mkdir(parents=True)
        nbformat.write(submission(answers), folder / f"{SECTION}.ipynb")

    environment = {
        # nbgrader opens files without an encoding; that is held against our code only.
        name: value for name, value in os.environ.items()
        if name not in ("PYTHONWARNDEFAULTENCODING", "PYTHONWARNINGS")
    } | {
        # As in an activated environment (nbgrader calls alembic), without the user's settings.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "JUPYTER_CONFIG_DIR": str(root / "jupyter"),
        "IPYTHONDIR": str(root / "ipython"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    for command in ("generate_assignment", "autograde"):
        done = subprocess.run(
            [sys.executable, "-m", "nbgrader", command, SECTION, "--course-dir", str(root)],
            cwd=root, env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, encoding="utf-8", errors="replace", timeout=300,
        )
        assert done.returncode == 0, done.stderr
    yield root
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def grades(course):
    """student -> cell -> (points by the tests or None, points there are, left to a person)"""
    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{course / 'gradebook.db'}") as gradebook:
        return {
            submitted.student.id: {
                grade.name: (grade.auto_score, grade.max_score, grade.needs_manual_grade)
                for grade in submitted.notebooks[0].grades
            }
            for submitted in gradebook.assignment_submissions(SECTION)
        }


def points(cells):
    return sum(score or 0 for score, _, _ in cells.values())


def test_the_right_submission_gets_every_automatic_point(grades):
    assert points(grades["right"]) == 17
    assert all(score == most for name, (score, most, _) in grades["right"].items()
               if name != "explanation")
    assert grades["right"]["explanation"] == (None, 3, True)  # waits for the lecturer


def test_the_wrong_submission_gets_a_part(grades):
    lost = {name for name, (score, _, _) in grades["wrong"].items() if score == 0}
    assert lost == LOST
    assert points(grades["wrong"]) == 6
    assert grades["wrong"]["explanation"] == (None, 3, True)


def test_the_empty_submission_gets_nothing_and_needs_no_lecturer(grades):
    assert len(grades["empty"]) == len(grades["right"])
    assert all(score == 0 and not manual for score, _, manual in grades["empty"].values())


def test_nbgrader_hands_out_the_notebook_that_is_committed(course):
    released = nbformat.read(course / "release" / SECTION / f"{SECTION}.ipynb", as_version=4)
    ours = nbformat.read(exercises.EXERCISES / f"{SECTION}.ipynb", as_version=4)
    assert [cell.source for cell in released.cells] == [cell.source for cell in ours.cells]
    assert [cell.id for cell in released.cells] == [cell.id for cell in ours.cells]
    for theirs, cell in zip(released.cells, ours.cells, strict=True):
        # nbgrader adds a checksum and the cell's type to its own entry.
        kept = exercises.grader(cell)
        assert {name: exercises.grader(theirs)[name] for name in kept} == kept
        assert theirs.metadata.get("editable") == cell.metadata.get("editable")
        assert theirs.metadata.get("deletable") == cell.metadata.get("deletable")
