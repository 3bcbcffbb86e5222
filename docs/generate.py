"""`make docs`: write the pages that are generated, from the code, the benchmarks and what the tutorial has measured."""

import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "docs", "docs/tutorial"))

import chat_templates_page
import cli_reference
import compatibility_page
import configuration_page
from benchmarks import comparison_table, performance_page, plan_accuracy_page
from write_pages import write_pages

from drawbar.config.io.explain import schema_json, schema_text

HERE = Path(__file__).parent
PAGES = {
    "configuration.md": configuration_page.render,
    "compatibility.md": compatibility_page.render,
    "performance.md": performance_page.render,
    "config.schema.json": lambda: schema_text(schema_json()),
    "plan_accuracy.md": plan_accuracy_page.render,
    "reference/cli.md": cli_reference.render,
} | ({"chat_templates.md": chat_templates_page.render} if chat_templates_page.IS_AVAILABLE else {})


COMPARISON = HERE / "comparison.md"


def main() -> None:
    COMPARISON.write_text(comparison_table.replace_in(COMPARISON.read_text("utf-8")), encoding="utf-8")
    for name, render in PAGES.items():
        path = HERE / name
        path.write_text(render(), encoding="utf-8")
        print(path)
    for path in write_pages():
        print(path)


if __name__ == "__main__":
    main()
