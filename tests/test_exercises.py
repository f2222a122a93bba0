"""The exercises: the student notebooks are built from their sources, and grade what they should.

The notebook's own cells are run here with many implementations in the student's place, wrong and
right ones. nbgrader itself grades in tests/classroom.
"""

import json
import math
import warnings
from collections import Counter

import nbformat
import pytest
import torch
import torch.nn.functional as F
from nbclient import NotebookClient

import exercises
from companion import losses

SOURCES = sorted(exercises.SOURCES.glob("*.py"))
DPO = exercises.SOURCES / "4.5.1-dpo.py"


def student(source):
    return exercises.student_notebook(source, **exercises.stubs())


def graded_cells(notebook):
    return [cell for cell in notebook.cells if exercises.grader(cell).get("grade")]


def hidden_part(text):
    """Only what stands between the markers of hidden tests."""
    begin, end = exercises.MARKERS["hidden tests"]
    return text.split(begin)[1].split(end)[0] if begin in text else ""


def grade(notebook, answers=None, *, hidden_only=False):
    """Run the code cells in order; returns the exception (None: passed) of each graded one.

    Args:
        answers: name -> value that a student's cell would have defined; the solution cell of that
            name, or of "predictions", is left out.
        hidden_only: graded cells without their visible part.
    """
    answers = dict(answers or {})
    names, results = {"__name__": "exercise"}, {}
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    last = max(code.index(cell) for cell in graded_cells(notebook) if cell in code)
    with warnings.catch_warnings():
        for cell in code[: last + 1]:
            if cell.id == "setup":  # readies a kernel, not this process
                continue
            if cell.id in answers:
                given = answers[cell.id]
                names.update(given if isinstance(given, dict) else {cell.id: given})
                continue
            is_graded = exercises.grader(cell).get("grade")
            text = hidden_part(cell.source) if is_graded and hidden_only else cell.source
            try:
                exec(compile(text, cell.id, "exec"), names)
                error = None
            except Exception as raised:
                error = raised
            if is_graded:
                results[cell.id] = error
    return results


def failed(results):
    return {cell for cell, error in results.items() if error is not None}


@pytest.fixture(scope="module")
def notebook():
    return exercises.instructor_notebook(DPO)


# --- the build ----------------------------------------------------------------------------------


def test_the_committed_student_notebooks_belong_to_their_sources(capsys):
    assert SOURCES
    assert exercises.main(["--check"]) == 0, capsys.readouterr().err


def test_check_names_a_notebook_that_is_out_of_date(tmp_path, monkeypatch, capsys):
    (tmp_path / "py").mkdir()
    (tmp_path / "py" / "9.9-new.py").write_text("# %%\n1\n", encoding="utf-8")
    monkeypatch.setattr(exercises, "SOURCES", tmp_path / "py")
    assert exercises.main(["--check"]) == 1
    assert "9.9-new.ipynb" in capsys.readouterr().err
    assert not (tmp_path / "9.9-new.ipynb").exists()
    exercises.SOURCES.parent.joinpath("9.9-new.ipynb").write_text("{}", encoding="utf-8")
    assert exercises.main(["--check"]) == 1


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_two_builds_are_the_same_bytes(source):
    assert exercises.as_text(student(source)) == exercises.as_text(student(source))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_student_notebook_has_no_solution_no_hidden_test_and_no_output(source):
    whole, given = exercises.instructor_notebook(source), student(source)
    left_over = {line for cell in given.cells for line in cell.source.split("\n")}
    assert "SOLUTION" not in exercises.as_text(given) and "HIDDEN" not in exercises.as_text(given)

    everywhere = Counter(line for cell in whole.cells for line in cell.source.split("\n"))
    for full, cell in zip(whole.cells, given.cells, strict=True):
        meta = exercises.grader(full)
        gone = set(full.source.split("\n")) - set(cell.source.split("\n"))
        if meta.get("solution") or meta.get("grade"):
            # By lines of its own: `loss.backward()` may well stand in a visible cell too.
            own = [line for line in gone if everywhere[line] == 1 and "###" not in line]
            assert own, f"{full.id}: nothing was cut out"
            assert not set(own) & left_over
        else:
            assert not gone
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_cells_keep_nbgraders_metadata_and_the_students_code_compiles(source):
    given = student(source)
    nbformat.validate(given)
    for cell in given.cells:
        meta = exercises.grader(cell)
        if meta:
            assert meta["schema_version"] == 3
            assert {"grade", "locked", "solution", "grade_id"} <= set(meta)
            assert ("points" in meta) == meta["grade"]
            assert not cell.metadata["deletable"]
        if cell.cell_type == "code":
            compile(cell.source, cell.id, "exec")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_every_test_cell_has_hidden_tests_and_the_points_sum_to_20(source):
    cells = graded_cells(exercises.instructor_notebook(source))
    for cell in cells:
        if cell.cell_type == "code":
            assert hidden_part(cell.source).strip(), cell.id
    assert sum(exercises.grader(cell)["points"] for cell in cells) == 20


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_solution_runs_in_a_kernel_without_error_or_warning(source, monkeypatch):
    # torch and ipykernel open files without an encoding; that is held against our code only.
    monkeypatch.delenv("PYTHONWARNDEFAULTENCODING", raising=False)
    whole = exercises.instructor_notebook(source)
    NotebookClient(whole, timeout=120, shutdown_kernel="immediate").execute()
    for cell in whole.cells:
        for output in cell.get("outputs", []):
            # nbgrader takes the points away for anything on stderr
            assert output.get("name") != "stderr", f"{cell.id}: {output.text}"


META = '{{"grade": {0}, "grade_id": "a", "locked": false, "schema_version": 3, "solution": {1}}}'
SOLUTION_CELL = META.format("false", "true")
PLAIN_CELL = META.format("false", "false")


@pytest.mark.parametrize(
    "meta, lines, message",
    [
        (SOLUTION_CELL, ["### BEGIN SOLUTION", "1"], "never closed"),
        (SOLUTION_CELL, ["### BEGIN SOLUTION"] * 2, "inside another"),
        (SOLUTION_CELL, ["1", "### END SOLUTION"], "without its beginning"),
        (PLAIN_CELL, ["### BEGIN SOLUTION", "### END SOLUTION"], "no solution"),
        (PLAIN_CELL, ["### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS"], "not graded"),
        (PLAIN_CELL, ["1", "", f"# %% nbgrader={PLAIN_CELL}", "2"], "more than once"),
    ],
)
def test_a_source_with_a_slip_is_refused_by_name(tmp_path, meta, lines, message):
    source = tmp_path / "slip.py"
    source.write_text("\n".join([f"# %% nbgrader={meta}", *lines, ""]), encoding="utf-8")
    with pytest.raises(ValueError, match=f"slip.py.*{message}"):
        student(source)


def test_a_course_gets_the_solutions_and_keeps_a_config_of_its_own(tmp_path, capsys):
    exercises.main(["--course", str(tmp_path)])
    source = tmp_path / "source" / "4.5.1-dpo" / "4.5.1-dpo.ipynb"
    assert "BEGIN HIDDEN TESTS" in source.read_text(encoding="utf-8")
    config = tmp_path / "nbgrader_config.json"
    assert json.loads(config.read_text(encoding="utf-8"))["ClearSolutions"]
    config.write_text("{}", encoding="utf-8")
    exercises.main(["--course", str(tmp_path)])
    assert config.read_text(encoding="utf-8") == "{}"


# --- 4.5.1 DPO: what the tests accept and reject ------------------------------------------------


def closed_form(rewards, ref_probs, beta):
    tilted = torch.tensor(ref_probs, dtype=torch.float64) * (
        torch.tensor(rewards, dtype=torch.float64) / beta).exp()
    return tilted / tilted.sum()


# In the place of question 3's training, where another question is at stake.
QUICK = {"trained_policy": closed_form}


def delta(c, r, ref_c, ref_r):
    return (c - ref_c.detach()) - (r - ref_r.detach())


RIGHT_LOSSES = {
    "logsigmoid": lambda c, r, rc, rr, beta: -F.logsigmoid(beta * delta(c, r, rc, rr)).mean(),
    "softplus": lambda c, r, rc, rr, beta: F.softplus(beta * -delta(c, r, rc, rr)).mean(),
    "logaddexp": lambda c, r, rc, rr, beta: torch.logaddexp(
        torch.zeros_like(c), -beta * delta(c, r, rc, rr)
    ).mean(),
    "cross entropy": lambda c, r, rc, rr, beta: F.binary_cross_entropy_with_logits(
        beta * delta(c, r, rc, rr), torch.ones_like(c)
    ),
    "two-way softmax": lambda c, r, rc, rr, beta: -torch.stack(
        [beta * (c - rc.detach()), beta * (r - rr.detach())]
    ).log_softmax(0)[0].mean(),
    "the package's": losses.dpo_loss,
}

# name -> (loss, what the visible tests say about it)
WRONG_LOSSES = {
    "sign of the loss": (
        lambda c, r, rc, rr, beta: F.logsigmoid(beta * delta(c, r, rc, rr)).mean(), "符号が逆"),
    "sign inside sigma": (
        lambda c, r, rc, rr, beta: -F.logsigmoid(-beta * delta(c, r, rc, rr)).mean(), "符号が逆"),
    "swapped pair": (
        lambda c, r, rc, rr, beta: -F.logsigmoid(beta * delta(r, c, rr, rc)).mean(),
        "入れ替わっている"),
    "no reference": (
        lambda c, r, rc, rr, beta: -F.logsigmoid(beta * (c - r)).mean(), "引かれていない"),
    "reference added": (
        lambda c, r, rc, rr, beta: -F.logsigmoid(beta * delta(c, r, -rc, -rr)).mean(), "足して"),
    "beta outside sigma": (
        lambda c, r, rc, rr, beta: -beta * F.logsigmoid(delta(c, r, rc, rr)).mean(),
        "β が σ の外"),
    "no beta": (
        lambda c, r, rc, rr, beta: -F.logsigmoid(delta(c, r, rc, rr)).mean(), "β が掛かっていない"),
    "beta on the chosen side": (
        lambda c, r, rc, rr, beta: -F.logsigmoid(
            beta * (c - rc.detach()) - (r - rr.detach())).mean(), "片方"),
    "beta not on the reference": (
        lambda c, r, rc, rr, beta: -F.logsigmoid(
            beta * (c - r) - (rc - rr).detach()).mean(), "参照方策の側"),
    "no logarithm": (
        lambda c, r, rc, rr, beta: -torch.sigmoid(beta * delta(c, r, rc, rr)).mean(), "σ の対数"),
    "no sigma": (
        lambda c, r, rc, rr, beta: -(beta * delta(c, r, rc, rr)).mean(), "σ を通していない"),
    "no mean": (
        lambda c, r, rc, rr, beta: -F.logsigmoid(beta * delta(c, r, rc, rr)), "スカラー"),
    "sum over the batch": (
        lambda c, r, rc, rr, beta: -F.logsigmoid(beta * delta(c, r, rc, rr)).sum(), "合計"),
    "mean before the logarithm": (
        lambda c, r, rc, rr, beta: -F.logsigmoid(beta * delta(c, r, rc, rr).mean()), "順序が逆"),
    "log of sigmoid": (
        lambda c, r, rc, rr, beta: -torch.sigmoid(beta * delta(c, r, rc, rr)).log().mean(),
        "まとめて計算"),
    "log of 1 + exp": (
        lambda c, r, rc, rr, beta: (1 + (-beta * delta(c, r, rc, rr)).exp()).log().mean(),
        "まとめて計算"),
    "clamped sigmoid": (
        lambda c, r, rc, rr, beta: -torch.sigmoid(
            beta * delta(c, r, rc, rr)).clamp(min=1e-12).log().mean(), "ほぼ 1000"),
    "clamped margin": (
        lambda c, r, rc, rr, beta: -F.logsigmoid(
            (beta * delta(c, r, rc, rr)).clamp(-50, 50)).mean(), "ほぼ 1000"),
    "reference not detached": (
        lambda c, r, rc, rr, beta: -F.logsigmoid(beta * ((c - rc) - (r - rr))).mean(),
        "参照方策に勾配"),
    "policy detached": (
        lambda c, r, rc, rr, beta: -F.logsigmoid(
            beta * delta(c.detach(), r, rc, rr)).mean(), "方策に勾配が流れていません"),
    "label smoothing": (
        lambda c, r, rc, rr, beta: -(
            0.9 * F.logsigmoid(beta * delta(c, r, rc, rr))
            + 0.1 * F.logsigmoid(-beta * delta(c, r, rc, rr))).mean(), "見比べて"),
    "beta twice": (
        lambda c, r, rc, rr, beta: -F.logsigmoid(beta**2 * delta(c, r, rc, rr)).mean(),
        "見比べて"),
    "not differentiable": (
        lambda c, r, rc, rr, beta: torch.tensor(
            -F.logsigmoid(beta * delta(c, r, rc, rr)).mean().item()), "does not require grad"),
    "a Python number": (
        lambda c, r, rc, rr, beta: -F.logsigmoid(beta * delta(c, r, rc, rr)).mean().item(),
        "テンソル"),
}
LOSS_TESTS = {"test_value", "test_batch", "test_gradient", "test_stability"}


def test_the_solution_passes_and_the_empty_notebook_earns_nothing(notebook):
    assert failed(grade(notebook)) == set()
    # The student's own notebook, with the hidden tests put back as nbgrader does.
    empty = student(DPO)
    for cell, whole in zip(empty.cells, notebook.cells, strict=True):
        if exercises.grader(whole).get("grade"):
            cell.source = whole.source
    results = grade(empty)
    assert failed(results) == set(results)
    assert isinstance(results["test_value"], NotImplementedError)


@pytest.mark.parametrize("name", RIGHT_LOSSES)
def test_right_losses_pass_everything(notebook, name):
    results = grade(notebook, {"dpo_loss": RIGHT_LOSSES[name], **QUICK})
    assert failed(results) == set(), results


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_wrong_losses_are_rejected_and_the_visible_tests_say_why(notebook, name):
    loss, hint = WRONG_LOSSES[name]
    answers = {"dpo_loss": loss, **QUICK}

    results = grade(notebook, answers)
    assert failed(results) & LOSS_TESTS
    assert failed(results) <= LOSS_TESTS
    assert failed(grade(notebook, answers, hidden_only=True)) & LOSS_TESTS

    seen = grade(student_with(notebook, answers), answers)
    messages = [str(error) for error in seen.values() if error is not None]
    assert any(hint in message for message in messages), messages


def student_with(notebook, answers):
    """The student's notebook, solved but for `answers`: visible tests only."""
    given = student(DPO)
    for cell, whole in zip(given.cells, notebook.cells, strict=True):
        if exercises.grader(whole).get("solution") and cell.id not in answers:
            cell.source = whole.source
    return given


@pytest.mark.parametrize(
    "right",
    [
        lambda logps, mask: logps.masked_fill(mask == 0, 0).sum(-1),
        lambda logps, mask: torch.einsum("bt,bt->b", logps, mask.to(logps)),
        lambda logps, mask: torch.stack(
            [row[keep > 0].sum() for row, keep in zip(logps, mask, strict=True)]),
    ],
    ids=["masked_fill", "einsum", "row by row"],
)
def test_right_sequence_log_probs_pass(notebook, right):
    assert failed(grade(notebook, {"sequence_logps": right, **QUICK})) == set()


@pytest.mark.parametrize(
    "wrong, hint",
    [
        (lambda logps, mask: (logps * mask).sum(-1) / mask.sum(-1), "トークン平均"),
        (lambda logps, mask: (logps * mask).mean(-1), "トークン平均"),
        (lambda logps, mask: logps.sum(-1), "パディング"),
        (lambda logps, mask: (logps * mask).sum(0), "形状"),
        (lambda logps, mask: (logps * mask).sum(), "形状"),
        (lambda logps, mask: (logps.exp() * mask).sum(-1).log(), "値が違います"),
    ],
    ids=["mean", "mean over the padded width", "no mask", "over responses", "total", "log of sum"],
)
def test_wrong_sequence_log_probs_are_rejected(notebook, wrong, hint):
    answers = {"sequence_logps": wrong, **QUICK}
    results = grade(notebook, answers)
    assert failed(results) == {"test_sequence_logps"}
    assert hint in str(results["test_sequence_logps"])
    assert failed(grade(notebook, answers, hidden_only=True)) == {"test_sequence_logps"}


def test_exactly_one_identity_fails_for_the_planted_bug(notebook):
    names = {}
    for cell in notebook.cells:
        if cell.id in ("imports", "buggy_dpo_loss", "show_identities", "dpo_loss"):
            with warnings.catch_warnings():
                exec(cell.source, names)
    for beta in (0.05, 0.25, 0.9):
        off = [abs(left - right) > 1e-6
               for _, left, right in names["identities"](names["buggy_dpo_loss"], beta)]
        assert off == [False, True, False]
        assert all(abs(left - right) < 1e-12
                   for _, left, right in names["identities"](names["dpo_loss"], beta))


@pytest.mark.parametrize(
    "answer", [dict(failed_identity=1, ratio=0.25), dict(failed_identity=3, ratio=0.25),
               dict(failed_identity=2, ratio=0.1), dict(failed_identity=2, ratio=4.0),
               dict(failed_identity="2", ratio=0.25), dict(failed_identity=2, ratio=math.nan)],
)
def test_a_wrong_diagnosis_is_rejected(notebook, answer):
    results = grade(notebook, {"failed_identity": answer, **QUICK})
    assert failed(results) == {"test_failed_identity"}


@pytest.mark.parametrize(
    "wrong",
    [
        WRONG_LOSSES["beta twice"][0],
        WRONG_LOSSES["no beta"][0],
        WRONG_LOSSES["swapped pair"][0],
        WRONG_LOSSES["sum over the batch"][0],
        lambda c, r, rc, rr, beta: -F.logsigmoid(0.25 * delta(c, r, rc, rr)).mean(),
    ],
    ids=["unchanged", "no beta", "swapped", "sum", "beta written in"],
)
def test_a_wrong_repair_is_rejected(notebook, wrong):
    results = grade(notebook, {"repaired_dpo_loss": wrong, **QUICK})
    assert failed(results) == {"test_repaired"}


@pytest.mark.parametrize("name", RIGHT_LOSSES)
def test_a_right_repair_passes_in_any_form(notebook, name):
    answers = {"repaired_dpo_loss": RIGHT_LOSSES[name], **QUICK}
    assert failed(grade(notebook, answers)) == set()


@pytest.mark.parametrize(
    "gap, prob, wrong",
    [
        (2, 0.65, set()),
        (2.0, 0.6488, set()),
        (torch.tensor(2.0), torch.tensor(0.6488), set()),
        (1.0, 0.65, {"test_predicted_gap"}),
        (0.5, 0.65, {"test_predicted_gap"}),
        (0.6137, 0.65, {"test_predicted_gap"}),
        (4.0, 0.65, {"test_predicted_gap"}),
        (2.0, 0.731, {"test_predicted_prob"}),
        (2.0, 0.8808, {"test_predicted_prob"}),
        (2.0, 0.4046, {"test_predicted_prob"}),
        (2.0, 0.64, {"test_predicted_prob"}),
        (2.0, 65.0, {"test_predicted_prob"}),
    ],
)
def test_predictions(notebook, gap, prob, wrong):
    answers = {"predictions": dict(predicted_gap=gap, predicted_prob=prob), **QUICK}
    assert failed(grade(notebook, answers)) == wrong


def descend(loss_of):
    """A trained_policy whose expected loss is loss_of(win, beta, log-ratio gap, logits)."""
    def trained_policy(rewards, ref_probs, beta, steps=300):
        win = torch.sigmoid(torch.tensor(rewards[0] - rewards[1], dtype=torch.float64))
        ref = torch.tensor(ref_probs, dtype=torch.float64).log()
        logits = ref.clone().requires_grad_()
        optimizer = torch.optim.SGD([logits], lr=2 / beta**2)
        for _ in range(steps):
            gap = (logits - ref)[0] - (logits - ref)[1]
            loss = loss_of(win, beta, gap, logits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return logits.softmax(0).detach()
    return trained_policy


@pytest.mark.parametrize(
    "right",
    [
        closed_form,
        descend(lambda win, beta, gap, _: -(
            win * F.logsigmoid(beta * gap) + (1 - win) * F.logsigmoid(-beta * gap))),
        descend(lambda win, beta, gap, _: F.binary_cross_entropy_with_logits(beta * gap, win)),
    ],
    ids=["closed form", "both orders", "cross entropy"],
)
def test_right_trainings_pass(notebook, right):
    assert failed(grade(notebook, {"trained_policy": right})) == set()


@pytest.mark.parametrize(
    "wrong",
    [
        descend(lambda win, beta, gap, _: -F.logsigmoid(beta * gap)),
        descend(lambda win, beta, gap, _: -0.5 * (
            F.logsigmoid(beta * gap) + F.logsigmoid(-beta * gap))),
        descend(lambda win, beta, gap, _: -(
            (1 - win) * F.logsigmoid(beta * gap) + win * F.logsigmoid(-beta * gap))),
        descend(lambda win, beta, gap, logits: F.binary_cross_entropy_with_logits(
            beta * (logits[0] - logits[1]), win)),
        lambda rewards, ref_probs, beta: torch.tensor([0.6488, 0.3512]),
    ],
    ids=["A always wins", "fair labels", "labels swapped", "no reference", "one number"],
)
def test_wrong_trainings_are_rejected(notebook, wrong):
    assert failed(grade(notebook, {"trained_policy": wrong})) == {"test_trained_policy"}
