"""Run the named benchmarks, or all of them: each module here with a ``main()``."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import benchmarks


def main(names: list[str]) -> int:
    known = sorted(
        module.name
        for module in pkgutil.iter_modules(benchmarks.__path__)
        if module.name not in ("__main__", "harness")
    )
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    for name in names or known:
        importlib.import_module(f"benchmarks.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
