"""What every message to a user must be like."""

import re


def check_one_message(output: str, *says: str) -> None:
    """No traceback, and one error that says all of ``says`` and what to do."""
    assert "Traceback" not in output
    assert len(re.findall(r"^error:", output, re.MULTILINE | re.IGNORECASE)) == 1, output
    begin = re.search(r"^(usage|error):", output, re.MULTILINE | re.IGNORECASE)
    assert begin is not None
    message = output[begin.start() :]
    assert re.search("fix:|did you mean|--help", message, re.IGNORECASE), message
    for words in says:
        assert words in message, f"{words!r} is not in: {message}"
