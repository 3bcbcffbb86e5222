"""configs/: every preset is a valid configuration that fits its machine, and what its README says of it is true."""

import re
from pathlib import Path

import pytest
from pages import column, unknown_settings

import drawbar
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES, check_degrees, check_rules
from drawbar.tasks.task_registry import task_class
from preset_models import CONFIGS, PRESETS, meta_model, named, shown, state_bytes

README = CONFIGS / "README.md"


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.stem)
def test_a_preset_is_valid_on_its_machine(preset: Path) -> None:
    loaded, name = drawbar.load_config(preset), named(preset)
    config = loaded.config
    check_rules(loaded, RULES + TRAIN_RULES)
    task_class(config.task.type)(config)
    nodes, gpus = int(name.get("nodes", 1)), int(name["gpus"])
    assert (config.run.name, config.launch.nproc) == (name["run"], gpus)
    assert (
        config.cluster is None if gpus == 1 else (config.cluster.nodes, config.cluster.gpus_per_node) == (nodes, gpus)
    )
    readers = check_degrees(config, nodes * gpus)
    rows = 1 if config.train.micro_batch == "auto" else config.train.micro_batch
    assert config.train.global_batch % (readers * rows) == 0


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.stem)
def test_a_preset_begins_with_what_it_is(preset: Path) -> None:
    comments = preset.read_text(encoding="utf-8").split("\nrun: ")[0].splitlines()
    assert all(line.startswith("# ") for line in comments)
    told = re.findall(r"^# (\w+): ", "\n".join(comments), re.MULTILINE)
    assert told == ["Data", "Recipe", "Memory", "Run"]
    assert set(re.findall(r"configs/(\S+)\.yaml", "\n".join(comments))) == {preset.stem}


@pytest.mark.exhaustive
def test_the_table_is_true() -> None:
    text = README.read_text(encoding="utf-8")
    states = column(text, "file", -1)
    files = [re.findall(r"\(([\w.]+)\)", cell)[0] for cell in column(text, "file")]
    assert sorted(files) == [preset.name for preset in PRESETS]
    for file, state in zip(files, states, strict=True):
        config, name = drawbar.load_config(CONFIGS / file).config, named(CONFIGS / file)
        assert state == shown(state_bytes(config, int(name.get("nodes", 1)) * int(name["gpus"]))), file
        if "size" in name:
            wanted = float(name["size"][:-1]) * {"m": 1e6, "b": 1e9}[name["size"][-1]]
            assert sum(p.numel() for p in meta_model(config).parameters()) == pytest.approx(wanted, rel=0.1), file
    assert unknown_settings(README) == []
