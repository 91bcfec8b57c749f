"""What the tests of explain share: a report in a few lines, and every block traced for itself."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.explain.evidence import Evidence
from tilewise.explain.recorder import Recorder
from tilewise.explain.report import Report
from tilewise.simt.hazards import BlockClass, Hazard, HazardWatch

__all__ = ["all_blocks", "brief", "floats", "hazard_counts", "kernel_from", "site", "totals"]

_FIELDS = (
    *("lanes", "requests", "cost", "ideal", "conflicts", "lines", "distinct_bytes", "moved"),
    *("source_cost", "source_ideal", "guide_cost", "guide_ideal"),
)


def floats(*shape: int) -> tuple[tuple[int, ...], str]:
    """An array of random float32, to be made up."""
    return shape, "float32"


def all_blocks(seen: Evidence) -> tuple[Recorder, HazardWatch]:
    """The same launch with every block traced for itself."""
    count = int(np.prod(seen.trial.grid))
    alone = [BlockClass(b, np.array([b])) for b in range(count)]
    recorder, watch = Recorder(alone), HazardWatch(alone)
    seen.trial.run(range(count), recorder, watch)
    recorder.finish()
    return recorder, watch


def totals(recorder: Recorder) -> dict[Any, Any]:
    """Everything that a recorder counted, by level, site and array."""
    return {
        (level, key): ({name: getattr(t, name) for name in _FIELDS}, dict(t.histogram))
        for level, table in (("source", recorder.totals), ("compiled", recorder.merged))
        for key, t in table.items()
    }


def hazard_counts(hazards: list[Hazard]) -> set[Any]:
    """The hazards with their counts, without the witnesses."""
    return {
        (h.kind, h.first.site.id, h.second and h.second.site.id, h.accesses, h.blocks, h.in_buffer)
        for h in hazards
    }


def brief(report: Report) -> list[str]:
    """A report in a few lines: what is wrong, what is wasted, what binds."""
    said = [
        f"{f.severity}: {f.kind}" + (f" of {f.array}" if f.array else "") for f in report.findings
    ]
    for row in report.sites:
        if row.cost > row.ideal:
            said.append(
                f"{row.text} ({row.op}) takes {row.cost / row.requests:.3g} {row.unit} a request "
                f"where {row.ideal / row.requests:.3g} would do"
            )
    if report.roofs is not None:
        percent = 100 * min(roof.fraction for roof in report.roofs.roofs)
        said.append(f"{report.roofs.binding} binds: at most {percent:.0f} % of the float peak")
    return said


def site(report: Report, text: str, op: str) -> Any:
    """The row of the place with this source text."""
    (row,) = (row for row in report.sites if (row.text, row.op) == (text, op))
    return row


_serial = itertools.count()
_folder: tempfile.TemporaryDirectory[str] | None = None


def kernel_from(source: str, name: str) -> Callable[..., Any]:
    """A kernel from source text, by way of a file, since its source must be readable."""
    global _folder
    _folder = _folder or tempfile.TemporaryDirectory()
    path = Path(_folder.name) / f"explained_{next(_serial)}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)
