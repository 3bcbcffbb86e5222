"""`drawbar eval --harness`: the scores of lm-eval on the run are those of lm-eval on its exported folder."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from harness import run_cli
from programs import lacks
from runs import Fit

TASK = """\
task: carts
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/carts.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
WRITING = """\
task: writes
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/carts.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["and"], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match}]
"""
QUESTIONS = [
    {"question": f"the {one}", "choices": [" along the road", " load", " engine and engine"], "answer": number % 3}
    for number, one in enumerate(["driver", "engine", "hill", "wind", "village", "load", "road"])
]


def scores_elsewhere(folder: Path, tasks: list[str]) -> dict[str, Any]:
    import lm_eval

    found = lm_eval.simple_evaluate(
        model="hf", model_args=f"pretrained={folder},dtype=float32", device="cpu", tasks=tasks, bootstrap_iters=0
    )
    return {
        f"{task}/{name.removesuffix(',none')}": value
        for task, values in found["results"].items()
        for name, value in values.items()
        if isinstance(value, float) and "stderr" not in name
    }


@pytest.mark.exhaustive
def test_scores_are_those_of_the_exported_folder(fit: Fit, run: Path, project: Path) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        lacks("no lm-eval here: make .venv/installed-others")
    fit("train.steps=6")
    (project / "carts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    for name, text in (("carts", TASK), ("writes", WRITING)):
        (project / f"{name}.yaml").write_text(text.replace("FOLDER", str(project)))
    done = run_cli("eval", str(run), "--harness", "carts.yaml,writes.yaml", "eval.micro_batch=2", cwd=project)
    assert done.code == 0, done.err
    assert run_cli("export", str(run), "--to", "exported", cwd=project).code == 0
    here = json.loads((run / "eval" / "harness" / "scores.json").read_text())
    assert (here.pop("step"), here.pop("records")) == (6, 0)
    there = scores_elsewhere(project / "exported", [str(project / "carts.yaml"), str(project / "writes.yaml")])
    assert {"carts/acc", "carts/acc_norm", "writes/exact_match"} <= here.keys()
    assert here == pytest.approx(there)
    refused = run_cli("eval", str(run), "--harness", "no_such_task", cwd=project)
    assert refused.code == 2
    assert "lm-eval has no task 'no_such_task'" in refused.err


def test_its_options_are_its_own(project: Path) -> None:
    refused = run_cli("eval", "runs/tiny", "--limit", "3", cwd=project)
    assert refused.code == 2
    assert "--fewshot and --limit are for --harness" in refused.err
