"""What nodes say of themselves, and what is wrong with it."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from drawbar.launch.node.node_facts import Gpu, NodeFacts, collect_facts, judge, judge_clocks, query_gpus

VERSIONS = {"drawbar": "0.1.0", "torch": "2.13.0", "Python": "3.11.7"}
NODES = [NodeFacts(f"n{number}", VERSIONS, "abc", 8, 8, (Gpu(0, 80_000, 500),), "550.54") for number in (1, 2, 3)]


def changed(**values: object) -> list[NodeFacts]:
    """The second node is another one."""
    return [NODES[0], replace(NODES[1], **values), NODES[2]]  # type: ignore[arg-type]


def test_nodes_that_are_alike() -> None:
    verdict = judge(NODES)
    assert (verdict.errors, verdict.warnings, verdict.bad) == ([], [], {})
    assert NodeFacts.from_json(asdict(NODES[0])) == NODES[0]


@pytest.mark.parametrize(
    ("values", "says", "is_error", "is_bad"),
    [
        ({"versions": {**VERSIONS, "torch": "2.12.1"}},
         "torch is not the same on all nodes: 2.13.0 on n1, n3; 2.12.1 on n2", True, False),
        ({"versions": {**VERSIONS, "drawbar": "0.2.0"}}, "drawbar is not the same", True, False),
        ({"versions": {**VERSIONS, "Python": "3.12.1"}}, "Python is not the same", False, False),
        ({"driver": "535.1"}, "the NVIDIA driver is not the same on all nodes: 550.54 on n1, n3; 535.1 on n2",
         False, False),
        ({"config": "xyz"}, "the configuration on n2 is another one", True, False),
        ({"gpu_count": 7}, "torch sees 7 GPUs on n2, and 8 on another node", True, True),
        ({"trouble": "nvidia-smi gave no answer in 20 s"}, "n2: nvidia-smi gave no answer", False, False),
        ({"gpus": (Gpu(3, 80_000, 9_000, (42,)),)},
         "GPU 3 on n2 is in use: 9,000 of 80,000 MiB are taken (processes 42)", False, False),
        ({"gpus": (Gpu(3, 80_000, 79_000),)}, "GPU 3 on n2 is in use: 79,000 of 80,000 MiB are taken", True, True),
    ],
)  # fmt: skip
def test_the_odd_one_is_named(values: dict[str, object], says: str, is_error: bool, is_bad: bool) -> None:
    verdict = judge(changed(**values))
    told, other = (verdict.errors, verdict.warnings) if is_error else (verdict.warnings, verdict.errors)
    assert len(told) == 1
    assert says in told[0]
    assert other == []
    assert list(verdict.bad) == (["n2"] if is_bad else [])


def test_clocks() -> None:
    nodes = [replace(node, time=1000.0 + offset) for node, offset in zip(NODES, (0, 12, -7), strict=True)]
    assert judge_clocks(nodes, [1000.0, 1000.0, 1000.0]) == [
        "the clock of n2 is 12 s ahead of that of n1",
        "the clock of n3 is 7 s behind that of n1",
    ]
    assert judge_clocks(NODES, [1.0, 2.0, 3.0]) == []


NVIDIA_SMI = """\
#!/bin/bash
case "$1" in
  *gpu=*) printf '0, GPU-aaa, 81559, 4, 550.54.15\\n1, GPU-bbb, 81559, 76000, 550.54.15\\n';;
  *) printf 'GPU-bbb, 4711\\nGPU-bbb, 4712\\n';;
esac
"""


def test_gpus_as_nvidia_smi_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in: the program comes with the driver."""
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert query_gpus({}) == ((), "", "")
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    free, used = Gpu(0, 81559, 4), Gpu(1, 81559, 76000, (4711, 4712))
    assert query_gpus({}) == ((free, used), "550.54.15", "")
    assert query_gpus({"CUDA_VISIBLE_DEVICES": "1"})[0] == (used,)
    assert query_gpus({"CUDA_VISIBLE_DEVICES": "GPU-aaa"})[0] == (free,)
    assert query_gpus({"CUDA_VISIBLE_DEVICES": ""})[0] == ()
    program.write_text("#!/bin/bash\necho 'Failed to initialize NVML: Unknown Error' >&2\nexit 9\n")
    assert query_gpus({}) == ((), "", "nvidia-smi failed: Failed to initialize NVML: Unknown Error")
    program.write_text("#!/bin/bash\necho '0, GPU-aaa, [N/A], [N/A], 550.54.15'\n")
    assert query_gpus({})[2].startswith("nvidia-smi does not tell")


def test_facts_of_this_node() -> None:
    facts = collect_facts("n1", "run: {}", 2, "cpu")
    assert (facts.name, facts.processes, facts.gpu_count, facts.gpus) == ("n1", 2, 0, ())
    assert facts.versions.keys() == VERSIONS.keys()
    assert facts.config != collect_facts("n1", "run: {name: x}", 2, "cpu").config
