"""`make docs`: write the pages that are generated, from the code and from the results of the benchmarks."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import performance_page

from drawbar.config.io.explain import markdown_reference
from drawbar.config.rules import compatibility

PAGES = {
    "configuration.md": markdown_reference,
    "compatibility.md": compatibility.markdown,
    "performance.md": performance_page.render,
}


def main() -> None:
    for name, render in PAGES.items():
        path = Path(__file__).parent / name
        path.write_text(render(), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
