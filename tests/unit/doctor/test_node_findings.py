"""How the nodes of a job differ."""

import json
from dataclasses import asdict, replace

import pytest

from drawbar.launch import findings
from drawbar.launch.findings import Gpu, Gpus, Level, NodeFacts
from drawbar.launch.node_check import collect_facts

VERSIONS = {"drawbar": "0.1.0", "torch": "2.13.0", "Python": "3.11.7", "the NVIDIA driver": "550.54"}
GPUS = Gpus((Gpu(0, 80_000, 500),), "550.54")
NODES = [NodeFacts(f"n{number}", VERSIONS, "abc", 8, GPUS) for number in (1, 2, 3)]


def test_nodes_that_are_alike() -> None:
    assert list(findings.of_nodes(NODES)) == []
    assert NodeFacts.from_json(json.loads(json.dumps(asdict(NODES[0])))) == NODES[0]


@pytest.mark.parametrize(
    ("values", "where", "level", "says"),
    [
        ({"versions": {**VERSIONS, "torch": "2.12.1"}}, "", Level.PROBLEM,
         "torch is not the same on all nodes: 2.13.0 on n1, n3; 2.12.1 on n2"),
        ({"versions": {**VERSIONS, "drawbar": "0.2.0"}}, "", Level.PROBLEM, "drawbar is not the same"),
        ({"versions": {**VERSIONS, "Python": "3.12.1"}}, "", Level.WARNING, "Python is not the same"),
        ({"versions": {**VERSIONS, "the NVIDIA driver": ""}}, "", Level.WARNING,
         "the NVIDIA driver is not the same on all nodes: 550.54 on n1, n3; unknown on n2"),
        ({"config": "xyz"}, "", Level.PROBLEM, "the configuration on n2 differs from"),
        ({"gpu_count": 7}, "n2", Level.PROBLEM, "torch sees 7 GPUs on n2, and 8 on another node"),
        ({"gpus": Gpus(trouble="nvidia-smi gave no answer in 20 s")}, "NVIDIA driver", Level.WARNING,
         "n2: nvidia-smi gave no answer"),
        ({"gpus": Gpus((Gpu(3, 80_000, 79_000),))}, "n2", Level.PROBLEM,
         "GPU 3 on n2 is in use: 79,000 of 80,000 MiB are taken"),
    ],
)  # fmt: skip
def test_the_odd_one_is_named(values: dict[str, object], where: str, level: Level, says: str) -> None:
    odd = replace(NODES[1], **values)  # type: ignore[arg-type]
    (found,) = findings.of_nodes([NODES[0], odd, NODES[2]])
    assert (found.where, found.level) == (where, level)
    assert says in found.what


def test_clocks() -> None:
    nodes = [replace(node, time=1000.0 + offset) for node, offset in zip(NODES, (0, 12, -7), strict=True)]
    found = list(findings.of_clocks(nodes, [1000.0, 1000.0, 1000.0]))
    assert {finding.level for finding in found} == {Level.WARNING}
    assert [finding.what for finding in found] == [
        "the clock of n2 is 12 s ahead of that of n1",
        "the clock of n3 is 7 s behind that of n1",
    ]
    assert list(findings.of_clocks(NODES, [1.0, 2.0, 3.0])) == []


def test_facts_of_this_node() -> None:
    facts = collect_facts("n1", "run: {}", "cpu")
    assert (facts.name, facts.gpu_count, facts.gpus) == ("n1", 0, Gpus())
    assert facts.versions.keys() == VERSIONS.keys()
    assert facts.config != collect_facts("n1", "run: {name: x}", "cpu").config
