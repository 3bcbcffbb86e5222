"""Programs that pip cannot bring: CI installs all of them, and CONTRIBUTING.md names all of them."""

import re
import subprocess
from pathlib import Path

import pytest

from programs import PACKAGES, REQUIRE, need_programs

ROOT = Path(__file__).parents[2]
CI = ROOT / ".ci" / "run"
needed = set(PACKAGES.values())


def test_ci_installs_what_the_tests_need_and_lets_none_be_skipped() -> None:
    text = CI.read_text()
    assert set(re.findall(r"^packages=\((.*)\)$", text, re.M)[0].split()) == needed
    assert text.index("install_programs\n") < text.index(f"export {REQUIRE}=1") < text.index("make test")
    need_programs("shellcheck")
    subprocess.run(["shellcheck", str(CI)], check=True)


def test_a_page_says_what_to_install() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (line,) = re.findall(r"^apt-get install --no-install-recommends (.*)$", page, re.M)
    assert set(line.split()) == needed


def test_a_missing_program_skips_a_test_or_fails_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(REQUIRE, raising=False)
    present = tmp_path / "sshd"
    present.touch(mode=0o755)
    monkeypatch.setattr("programs.search_path", lambda: str(tmp_path))
    remedy = "no sbatch, shellcheck here: apt-get install --no-install-recommends shellcheck slurm-wlm"
    with pytest.raises(pytest.skip.Exception, match=remedy):
        need_programs("sshd", "sbatch", "shellcheck")
    monkeypatch.setenv(REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match=f"{REQUIRE} is set, and there is {remedy}"):
        need_programs("sshd", "sbatch", "shellcheck")
    need_programs("sshd")
