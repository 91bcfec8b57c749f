"""Every code block of README and docs runs as it stands (case G15)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import tables

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

#: Commands that set a machine up or start the suite: run by people and by continuous integration.
SETUP = ("pip ", "git clone", "make ", "cd tilewise", "python -m venv", "python3 -m venv")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_G15_every_code_block_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """Run a page's blocks in order, in one folder: Python in one namespace, shell as written."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "100",
    }
    program = ["import os, subprocess, shlex"]
    for language, text in BLOCK.findall(page.read_text()):
        if language == "python":
            program.append(text)
        elif language in ("sh", "console", "bash"):
            for line in text.replace("\\\n", " ").splitlines():
                command = line.removeprefix("$ ").split("  #")[0].strip()
                if command and not command.startswith(("#", *SETUP)):
                    program.append(
                        f"print({command!r}); subprocess.run({shlex.split(command)!r}, check=True)"
                    )
        else:
            assert language in ("text", "json", "make"), f"say what language a block is: {text}"
    script = tmp_path / "page.py"
    script.write_text("\n".join(program))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_tables_are_the_figures_on_record() -> None:
    for path in tables.PAGES:
        page = path.read_text(encoding="utf-8")
        assert ".json -->" in page
        assert page == tables.filled(page), "run python -m benchmarks tables"
