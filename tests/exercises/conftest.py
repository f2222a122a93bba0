"""What the tests of the exercises share: a notebook run with given answers in a student's place."""

import warnings

import pytest

import exercises


def _hidden_part(text: str) -> str:
    begin, end = exercises.MARKERS["hidden tests"]
    return text.split(begin)[1].split(end)[0] if begin in text else ""


class Results(dict):
    """Graded cell's id -> the exception that it ended in, None where it passed."""

    @property
    def failed(self):
        return {cell for cell, error in self.items() if error is not None}


@pytest.fixture(scope="module")
def notebook(request):
    """The instructor's notebook of the source that the test module names."""
    return exercises.instructor_notebook(request.module.SOURCE)


@pytest.fixture(scope="session")
def grade():
    """Run a notebook's code cells in order; the `Results` of the graded ones.

    The function's arguments:
        notebook: the instructor's.
        answers: solution cell's id -> the value it would have defined under that name, or a dict
            of names; that cell is left out.
        part: "all" of a graded cell, what is "visible" to students, or only its "hidden" tests.
    """

    def run(notebook, answers=None, part="all"):
        answers = answers or {}
        names, results = {"__name__": "exercise"}, Results()
        with warnings.catch_warnings():
            for cell in notebook.cells:
                if cell.cell_type != "code" or cell.id == "setup":  # readies a kernel, not us
                    continue
                if cell.id in answers:
                    given = answers[cell.id]
                    names.update(given if isinstance(given, dict) else {cell.id: given})
                    continue
                graded, text = exercises.grader(cell).get("grade"), cell.source
                hidden = _hidden_part(text)
                if graded and part != "all":
                    text = hidden if part == "hidden" else text.replace(hidden, "\n")
                try:
                    exec(compile(text, cell.id, "exec"), names)
                    error = None
                except Exception as raised:
                    error = raised
                if graded:
                    results[cell.id] = error
        return results

    return run
