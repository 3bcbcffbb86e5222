"""The page of all settings and rules."""

import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))

from configuration_page import render  # noqa: E402

from drawbar.config.io.fields import catalogue  # noqa: E402
from drawbar.config.rules.rule_table import RULES, TRAIN_RULES  # noqa: E402
from drawbar.config.schema.run_config import run_config_type  # noqa: E402
from drawbar.config.schema.task_sections import CausalLMConfig  # noqa: E402


def test_it_has_every_setting_and_every_rule() -> None:
    text = render()
    for setting in catalogue(run_config_type(CausalLMConfig)).values():
        assert f"`{setting.key}`" in text
    for rule in RULES + TRAIN_RULES:
        assert rule.reason in text
        assert rule.remedy in text


def test_it_is_up_to_date() -> None:
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == render(), "run `make docs`"
