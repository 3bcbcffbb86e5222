"""Metrics by name, your own among them, and one flat dict of all scores."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drawbar.errors import UserError
from drawbar.metrics.metric_registry import BUILT_IN_METRICS, compute, load_metrics

OWN = """
import numpy as np
from drawbar.errors import UserError

not_a_function = 3

def agreement(predictions, references):
    return np.float32(sum(p == r for p, r in zip(predictions, references)) / len(references))

def several(predictions, references):
    return {"longest": max(map(len, predictions)), "count": len(predictions)}

def accuracy(predictions, references):
    return 0.5

def broken(predictions, references):
    return predictions[0].no_such_thing

def refuses(predictions, references):
    raise UserError("no", where="here", remedy="stop")

def text(predictions, references):
    return "0.5"

def array(predictions, references):
    return {"each": np.zeros(2)}

def numbered(predictions, references):
    return {3: 0.5}

def nothing(predictions, references):
    pass
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of the user's, on the path."""
    (tmp_path / "own_metrics.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("import math\n\n1 / 0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for module in ("own_metrics", "own_broken"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return "own_metrics"


def problem(error: pytest.ExceptionInfo[UserError]) -> str:
    assert error.value.where == "task.metrics"
    assert error.value.remedy
    return error.value.what


def test_one_flat_dict(own: str) -> None:
    metrics = load_metrics(["accuracy", f"{own}:several"])
    assert compute(metrics, ["a", "bb"], ["a", "b"]) == {"accuracy": 0.5, "longest": 2.0, "count": 2.0}


def test_your_own_function_is_named_by_its_name(own: str) -> None:
    scores = compute(load_metrics([f"{own}:agreement"]), ["a", "b"], ["a", "a"])
    assert scores == {"agreement": 0.5}
    assert type(scores["agreement"]) is float


def test_every_value_is_a_plain_float(own: str) -> None:
    values = {"int": 1, "numpy": np.float32(0.5), "array": np.array(2), "tensor": torch.tensor(0.25), "nan": math.nan}
    scores = compute({"x": lambda predictions, references: values}, [1], [1])
    assert all(type(value) is float for value in scores.values())
    assert list(scores) == list(values)
    assert (scores["int"], scores["numpy"], scores["array"], scores["tensor"]) == (1.0, 0.5, 2.0, 0.25)


def test_a_module_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics_here.py").write_text("def one(predictions, references):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert compute(load_metrics(["metrics_here:one"]), [0], [0]) == {"one": 1.0}


def test_built_in_names() -> None:
    assert load_metrics(["f1_macro", "rouge"]) == {
        "f1_macro": BUILT_IN_METRICS["f1_macro"],
        "rouge": BUILT_IN_METRICS["rouge"],
    }
    assert load_metrics([]) == {}


def test_an_unknown_name() -> None:
    with pytest.raises(UserError) as error:
        load_metrics(["accuracy", "f1_marco"])
    assert problem(error) == "there is no metric 'f1_marco'"
    assert "did you mean f1_macro?" in str(error.value.remedy)
    assert all(name in str(error.value) for name in BUILT_IN_METRICS)
    with pytest.raises(UserError) as error:
        load_metrics(["zzzzzz"])
    assert problem(error) == "there is no metric 'zzzzzz'"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module_xyz:f", "No module named 'no_such_module_xyz'"),
        ("own_broken:f", "ZeroDivisionError: division by zero"),
        ("own_broken:f", "own_broken.py:3"),
        ("own_metrics:agreemnt", "did you mean own_metrics:agreement?"),
        ("own_metrics:not_a_function", "is not a function, but of type"),
        ("own_metrics:", "has no ''"),
        (":f", "cannot be imported"),
    ],
)
def test_your_own_function_that_cannot_be_loaded(own: str, name: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        load_metrics([name])
    assert says in problem(error)
    assert repr(name) in problem(error)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("broken", "AttributeError: 'str' object has no attribute 'no_such_thing'"),
        ("broken", "own_metrics.py:17)"),
        ("text", "text = '0.5', which is no number"),
        ("nothing", "nothing = None, which is no number"),
        ("array", "each = array([0., 0.]), which is no number"),
        ("numbered", "a score called 3"),
    ],
)
def test_your_own_function_that_fails(own: str, function: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        compute(load_metrics([f"{own}:{function}"]), ["a"], ["a"])
    assert says in problem(error)
    assert f"{own}:{function}" in problem(error)


def test_your_own_message_is_kept(own: str) -> None:
    with pytest.raises(UserError, match=r"^no\n  where: here"):
        compute(load_metrics([f"{own}:refuses"]), ["a"], ["a"])


@pytest.mark.parametrize(
    ("name", "predictions", "says"),
    [
        ("bleu", [3, 4], "the metric bleu failed: it is for texts, and 3 is none"),
        ("f1_macro", [{}, {}], "the metric f1_macro failed: TypeError: "),
        ("entity_f1", [["NN"], ["NN"]], "the metric entity_f1 failed: the tag 'NN' is not"),
    ],
)
def test_a_metric_that_does_not_fit(name: str, predictions: list[Any], says: str) -> None:
    with pytest.raises(UserError) as error:
        compute(load_metrics([name]), predictions, list(predictions))
    assert says in problem(error)


def test_two_metrics_with_one_name(own: str) -> None:
    with pytest.raises(UserError) as error:
        compute(load_metrics(["accuracy", f"{own}:accuracy"]), ["a"], ["a"])
    assert problem(error) == "the metrics accuracy and own_metrics:accuracy both give a score called accuracy"
    with pytest.raises(UserError, match="entity_f1 and tag_accuracy both give a score called tag_accuracy"):
        compute(load_metrics(["entity_f1", "tag_accuracy"]), [["O"]], [["O"]])


def test_a_score_that_the_task_computes_from_the_loss(own: str) -> None:
    with pytest.raises(UserError) as error:
        compute(load_metrics([f"{own}:several"]), ["a"], ["a"], taken=("loss", "longest"))
    assert "own_metrics:several gives a score called longest, which the task itself computes" in problem(error)


@pytest.mark.parametrize(("predictions", "references"), [([], []), ([1], []), ([1], [1, 2])])
def test_lists_that_do_not_match(predictions: list[int], references: list[int]) -> None:
    with pytest.raises(ValueError, match=f"{len(predictions)} predictions for {len(references)} references"):
        compute(load_metrics(["accuracy"]), predictions, references)


def test_importing_is_light() -> None:
    """The libraries take seconds to import, and a task may need none of them."""
    heavy = "{'sklearn', 'scipy', 'sacrebleu', 'rouge_score', 'nltk', 'torch', 'transformers'}"
    program = f"import sys, drawbar.metrics.metric_registry; print(sorted({heavy} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[]"
