"""``drawbar config show --deepspeed``. Imports what it needs when it runs, as commands do."""

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from drawbar.config.io.load_config import LoadedConfig


def show(loaded: "LoadedConfig", processes: int) -> str:
    """Print, instead, the JSON that DeepSpeed gets from as many processes as `drawbar train` would start."""
    from drawbar.deepspeed.config_json import deepspeed_json
    from drawbar.deepspeed.settings import is_deepspeed
    from drawbar.errors import UserError

    if not is_deepspeed(loaded.config):
        raise UserError(
            "DeepSpeed does not run this configuration",
            where=f"parallel.strategy={loaded.config.parallel.strategy}",
            remedy="add parallel.strategy=deepspeed, or a section deepspeed such as deepspeed.preset=zero2",
        )
    precision: str = loaded.config.precision
    if precision == "auto":
        from drawbar.distributed.rank_info import RankInfo, choose_device
        from drawbar.parallel.precision import choose_precision

        precision = choose_precision(precision, choose_device(loaded.config.device, RankInfo(world_size=processes)))
    found = deepspeed_json(loaded, processes, precision)
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    return json.dumps(found.values, indent=2)
