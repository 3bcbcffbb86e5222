"""``drawbar import``."""

from pathlib import Path

import click

SOURCES = ("axolotl", "deepspeed", "huggingface", "llama_factory", "torchtitan")


@click.command(
    "import",
    short_help="Turn another trainer's configuration into one of drawbar's.",
    epilog="""\b
Examples:
  drawbar import lora.yaml                              shows the configuration, and what is not the same
  drawbar import lora.yaml --data-parallel 8 --out config.yaml
  drawbar import job.toml --from torchtitan --out config.yaml

\b
It reads YAML of axolotl, of LLaMA-Factory, and of transformers' and TRL's scripts (JSON, too), TOML of torchtitan,
and DeepSpeed's JSON. It runs nothing, and asks no network.
""",
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="CONFIG",
    help="The file to write, a new one. Default: the terminal.",
)
@click.option("--from", "name", type=click.Choice(SOURCES), help="Whose file it is. Default: its keys say it.")
@click.option(
    "--data-parallel",
    "processes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="How many data-parallel processes trained there: such files give the batch of one process.",
)
def import_command(file: Path, out: Path | None, name: str | None, processes: int) -> None:
    """Turn FILE, a configuration of another trainer, into one of drawbar's.

    Each key becomes settings, or a comment says why it changes nothing here. If keys have no counterpart and would
    change what is trained, all of them are listed with their lines, the exit code is 2, and nothing is written.
    """
    from drawbar.commands.output_files import writing
    from drawbar.errors import UserError
    from drawbar.imports.conversion import Conversion, detect, load_source
    from drawbar.imports.reading import read_keys
    from drawbar.imports.writing import check, missing, write
    from drawbar.util.atomic_files import write_atomically

    if out is not None and out.exists():
        raise UserError("there is such a file already", where=str(out), remedy="give another --out, or remove the file")
    keys = read_keys(file)
    name = name or detect(keys)
    if name is None:
        raise UserError("no key says whose file it is", where=str(file), remedy=f"say it: --from {' | '.join(SOURCES)}")
    conversion = Conversion(keys, load_source(name), processes).convert()
    check(conversion)
    text = write(conversion)
    if out is None:
        click.echo(text, nl=False)
    else:
        with writing(out, "--out"):
            write_atomically(out, text.encode())
    outcomes = [entry.outcome for entry in conversion.entries.values()]
    counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("converted", "no effect", "no counterpart"))
    click.echo(f"{file}: {len(outcomes)} keys of {conversion.source.title}: {counts}", err=True)
    for title, lines in (("not the same here", conversion.notes), ("still to be set", missing(conversion))):
        for line in lines:
            click.echo(f"{title}: {line}", err=True)
