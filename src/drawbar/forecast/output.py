"""A forecast as a JSON file."""

import json
from collections.abc import Sequence
from pathlib import Path

from drawbar.commands.output_files import writing
from drawbar.errors import UserError
from drawbar.forecast.forecast_tables import Compared
from drawbar.forecast.run_forecast import RunForecast
from drawbar.forecast.suggestions import Suggestion
from drawbar.util.atomic_files import replacing


def write_json(path: Path, forecast: RunForecast, compared: Compared, suggestions: Sequence[Suggestion] | None) -> None:
    """Write the forecast with the strategies beside it and the suggestions. Raises UserError where the disk refuses."""
    others = {name: {"error": one.what} if isinstance(one, UserError) else one.as_dict() for name, one in compared}
    changes = [{"overrides": one.text, "peak": one.forecast.largest.peak.bytes} for one in suggestions or ()]
    text = json.dumps(
        {**forecast.as_dict(), "strategies": others, "suggestions": changes}, ensure_ascii=False, indent=2
    )
    with writing(path, "--json"), replacing(path, one_writer=False) as file:
        file.write(text.encode() + b"\n")
