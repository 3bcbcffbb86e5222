"""Makes ``docs/images/parity.png``: the page of a comparison in which one strategy has a fault, in Debian's chromium.

    .venv/bin/python docs/images/make_parity.py

Needs the extra ``dev`` and the program ``chromium``.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).with_name("parity.png")
WIDTH = 1080
CONFIG = """\
run: {name: roads}
task:
  model: llama
  from_scratch: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4,
                 max_position_embeddings: 128}
  tokenizer: {train: byte_bpe, vocab_size: 320}
data: {train: train.txt, sequence_length: 64}
train: {global_batch: 8, micro_batch: 2, steps: 20}
optim: {lr: 1.0e-2}
device: cpu
"""


def compare() -> None:
    """The command, with one wrong line in the plan of tensor parallelism."""
    import drawbar
    from drawbar.engines import local_model

    plan_for = local_model.plan_for

    def wrong_plan(model: Any) -> Any:
        plan = plan_for(model)
        return dataclasses.replace(plan, tensor={**(plan.tensor or {}), "model.norm": "replicated"})

    local_model.plan_for = wrong_plan
    drawbar.main(drawbar.CausalLM)


def photograph(page_file: Path) -> None:
    """The page, from its top to the end of the table of modules."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        page = browser.new_page(viewport={"width": WIDTH, "height": 800}, color_scheme="light")
        page.goto(page_file.as_uri())
        end = page.locator("section:nth-of-type(2) details").first.bounding_box()
        assert end is not None
        page.screenshot(path=PICTURE, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": end["y"]})
        browser.close()
    with Image.open(PICTURE) as picture:  # few colours: a third of the bytes
        picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(PICTURE, optimize=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(CONFIG)
        words = ["the driver couples the load to the engine and the engine pulls the load along the road"] * 60
        (folder / "train.txt").write_text("\n".join(line[: 9 + n % 70] for n, line in enumerate(words)) + "\n")
        target = folder / "parity.html"
        command = ["parity", "config.yaml", "--ranks", "2", "--steps", "10", "--html", str(target)]
        command += ["--strategies", "ddp, zero1, fsdp, ddp tensor=2"]
        done = subprocess.run([sys.executable, str(Path(__file__).resolve()), *command], cwd=folder)
        assert done.returncode == 1, "the fault was not found"
        photograph(target)
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        compare()
    else:
        main()
