"""From what a user names to a kernel: ``guide``, ``module:function``, ``file.py:function``.

A file that says ``from numba import cuda`` gets :data:`tilewise.simt.cuda` and names of types in
its place, so that it loads without numba, and without the GPU that numba would look for. Only where
that is not enough, and numba is installed, is the file loaded again with the real one.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from .. import simt
from ..errors import FileError, KernelError, OptionError

__all__ = ["GUIDE", "is_of_the_guide", "load"]

#: The guide's kernels by name; its own is the one meant by ``guide``.
GUIDE = ("Muld", "Muld_any", "naive")

_TYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "boolean", "void"),
)
_SHORT = {
    f"{kind[0]}{size}": f"{kind}{8 * size}" for kind in ("int", "uint") for size in (1, 2, 4, 8)
}
_SHORT |= {f"f{size}": f"float{8 * size}" for size in (2, 4, 8)}


def is_of_the_guide(name: str) -> bool:
    """Whether a name means one of the guide's kernels."""
    return name == "guide" or name.startswith("guide:")


def load(name: str) -> Any:
    """Return the kernel that a name stands for.

    Parameters
    ----------
    name : str
        ``guide``, ``guide:naive``, ``package.module:function`` or ``path/file.py:function``; the
        function may be left out where a file has one kernel only.

    Raises
    ------
    FileError
        There is no such file, or it is not Python.
    KernelError
        It cannot be loaded, or has no such function.
    OptionError
        The name is none of these.
    """
    where, _, function = name.rpartition(":")
    # A colon within a path, as in C:\kernels.py, separates nothing.
    if not where or not function.isidentifier():
        where, function = name, ""
    if is_of_the_guide(name):
        return _of_the_guide(function or "Muld")
    if where.endswith(".py") or os.sep in where:
        module = _load_file(Path(where))
    elif function:
        module = _load_module(where)
    else:
        raise OptionError(
            f"{name!r} names no kernel; give guide, module:function or file.py:function"
        )
    return _pick(module, where, function)


def _of_the_guide(function: str) -> Any:
    from .. import guide

    if function not in GUIDE:
        raise OptionError(f"the guide has no kernel {function!r}; it has {', '.join(GUIDE)}")
    return getattr(guide, function)


def _pick(module: ModuleType, where: str, function: str) -> Any:
    kernels = [
        name
        for name, value in vars(module).items()
        if hasattr(value, "py_func") and getattr(value, "__module__", "") == module.__name__
    ]
    known = f"its kernels are {', '.join(kernels)}" if kernels else "it has no kernel"
    if not function:
        if len(kernels) != 1:
            raise OptionError(f"{where}: which function? {known}; give {where}:NAME")
        function = kernels[0]
    value = getattr(module, function, None)
    if value is None:
        raise KernelError(f"{where} has no function {function!r}; {known}")
    if not inspect.isfunction(getattr(value, "py_func", value)):
        raise KernelError(f"{where}:{function} is a {type(value).__name__}, and not a kernel")
    return value


def _load_module(name: str) -> ModuleType:
    def load() -> ModuleType:
        return importlib.import_module(name)

    try:
        return _loaded(load, name, Path.cwd())
    except ModuleNotFoundError:
        raise KernelError(f"there is no module {name!r} to import from here") from None


def _load_file(path: Path) -> ModuleType:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from None
    try:
        ast.parse(source, filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = f"{path}:{line}" if line else str(path)
        said = f"{getattr(error, 'msg', error)}: {(getattr(error, 'text', '') or '').strip()}"
        raise FileError(f"{place}: this is not Python: {said}") from None
    linecache.checkcache(str(path))
    name = f"explained_{path.stem}"

    def load() -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module

    return _loaded(load, str(path), path.resolve().parent)


def _loaded(load: Callable[[], ModuleType], where: str, folder: Path) -> ModuleType:
    """Load with the stand-in for numba, and if it lacks something with numba itself."""
    try:
        with _beside(folder), _numba_stood_in_for():
            return load()
    except (Exception, SystemExit) as error:
        lacks = isinstance(error, (ImportError, AttributeError)) and "numba" in str(error)
        if not lacks or not _numba_is_installed():
            raise _stopped(where, error) from None
    try:
        with _beside(folder):
            return load()
    except (Exception, SystemExit) as error:
        raise _stopped(where, error) from None


def _stopped(where: str, error: BaseException) -> Exception:
    """What went wrong while a user's file was loaded, with the line of that file."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename not in (__file__, _IMPORTLIB)
    ]
    if isinstance(error, ModuleNotFoundError) and not frames:
        return error
    place = f"{frames[0].filename}:{frames[0].lineno}" if frames else where
    line = f" ({frames[0].line})" if frames and frames[0].line else ""
    if isinstance(error, ModuleNotFoundError):
        return KernelError(f"{place}{line}: {error.name} is not installed")
    if isinstance(error, ImportError) and error.name == "numba":
        return KernelError(
            f"{place}{line}: numba is not installed, and tilewise stands in for its cuda and its "
            "types only"
        )
    said = str(error).partition("\n")[0]
    return KernelError(
        f"{place}{line}: loading it stopped with {type(error).__name__}: {said}; keep what "
        'launches kernels under if __name__ == "__main__"'
    )


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Find modules beside a file, as when it is run; what it prints goes to stderr."""
    path = sys.path[:]
    sys.path.insert(0, str(folder))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path[:] = path


@contextlib.contextmanager
def _numba_stood_in_for() -> Iterator[None]:
    module = ModuleType("numba", "Stands in for numba while a kernel's file is loaded.")
    types = {name: _Type(_SHORT.get(name, name)) for name in (*_TYPES, *_SHORT)}
    vars(module).update(types, __path__=[], cuda=simt.cuda, types=module)
    stand_ins: dict[str, Any] = {"numba": module, "numba.cuda": simt.cuda, "numba.types": module}
    real = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, before in real.items():
            if before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = before


def _numba_is_installed() -> bool:
    return "numba" in sys.modules or importlib.util.find_spec("numba") is not None


class _Type:
    """A type of numba's: of an array in a signature, ``float32[:]``, or of a number."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, _: Any) -> _Type:
        return self

    def __call__(self, *values: Any) -> Any:
        if len(values) == 1 and isinstance(values[0], (int, float, np.generic)):
            return np.dtype(_DTYPES.get(self.name, self.name)).type(values[0])
        return self  # a signature, void(float32[:])


# By which the dialect knows numba's types.
_Type.__module__ = "numba"
_DTYPES = {"boolean": "bool"}
_IMPORTLIB = importlib.__file__
