"""Every exercise: its solution earns all points, and the student's notebook as it is none."""

import pytest

import exercises


@pytest.mark.parametrize("source", sorted(exercises.SOURCES.glob("*.py")), ids=lambda p: p.stem)
def test_the_solution_passes_and_the_empty_notebook_earns_nothing(source, grade):
    whole = exercises.instructor_notebook(source)
    assert grade(whole).failed == set()
    empty = exercises.student_notebook(source, **exercises.stubs())
    for cell, original in zip(empty.cells, whole.cells, strict=True):
        if exercises.grader(original).get("grade"):
            cell.source = original.source  # nbgrader puts the hidden tests back
    results = grade(empty)
    assert results.failed == set(results)
