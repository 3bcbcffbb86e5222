"""docs/preflight.md: the settings that it names exist, and what it shows is what is written."""

import json
import re
from pathlib import Path

from pages import blocks

from drawbar.config.schema.run_config import LaunchSection, RunConfig
from drawbar.jobs.settings import ClusterSection
from drawbar.launch.findings import BAD_NODES_FILE, bad_nodes, record_bad_nodes

PAGE = Path(__file__).parents[2] / "docs" / "preflight.md"


def test_every_setting_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:set )?((?:cluster|launch)\.\w+)", text))
    assert {"cluster.exclude_bad_nodes", "cluster.preflight", "launch.roll_call_seconds"} <= named
    sections = {"cluster": ClusterSection, "launch": LaunchSection}
    for setting in named:
        section, _, key = setting.partition(".")
        assert key in sections[section].model_fields, setting
    default = RunConfig().launch.roll_call_seconds
    assert f"`launch.roll_call_seconds` ({default})" in text


def test_the_file_of_bad_nodes_is_as_shown(tmp_path: Path) -> None:
    (block,) = (block for block in blocks(PAGE) if block.language == "json")
    (shown,) = json.loads(block.text)
    record_bad_nodes(tmp_path, shown["job"], shown["nodes"])
    (written,) = json.loads((tmp_path / "launch" / BAD_NODES_FILE).read_text())
    assert {**written, "time": shown["time"]} == shown
    assert bad_nodes(tmp_path, shown["job"], restart=0) == shown["nodes"]
    assert bad_nodes(tmp_path, shown["job"], restart=1) == bad_nodes(tmp_path, "drawbar-5") == {}
