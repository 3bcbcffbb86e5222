"""`make demo`: train a small Llama on the Python standard library, show what it learned, and write a report of it."""

import sys
from pathlib import Path

import torch
from ngrams import bits_per_byte

import drawbar
from drawbar.report.report_page import write_report
from drawbar.tracking.table import print_table

HERE = Path(__file__).parent
PROMPT = 'def read(self, size=-1):\n    """'


def main(overrides: list[str]) -> int:
    config = drawbar.load_config(HERE / "config.yaml", overrides).config
    outcome = drawbar.Trainer(config).fit()
    if outcome.exit_code != 0:
        return outcome.exit_code

    task = drawbar.CausalLM(config)
    train, validation = ([record["text"] for record in task.records(split)] for split in ("train", "validation"))
    run = drawbar.load_run(config.run_dir, checkpoint="best")
    torch.manual_seed(1)
    [sample] = run.generate(PROMPT, max_new_tokens=110, temperature=0.6)

    print("\nA sample:\n")
    print(PROMPT + sample)
    print()
    print_table(
        "Validation bits per byte (less is better)",
        ["model", "bits per byte"],
        [
            ["unigram bytes, counted on all training text", f"{bits_per_byte(train, validation, order=1):.3f}"],
            ["trigram bytes, counted on all training text", f"{bits_per_byte(train, validation, order=3):.3f}"],
            [f"this Llama, after {outcome.progress.step} steps", f"{outcome.progress.best_score:.3f}"],
        ],
    )
    report = config.run_dir / "report.html"
    write_report([config.run_dir], report)
    print(f"\nThe run is in {config.run_dir}: metrics.jsonl, logs/, checkpoints/, tensorboard/, eval/.")
    print(f"More of its Python:  .venv/bin/drawbar generate {config.run_dir} --prompt 'class '")
    print(f"Its curves, scores and events, for a browser:  {report}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
