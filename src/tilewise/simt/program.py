"""A kernel's source, read once: its tree, the places where it touches memory, its outside names.

Nothing is executed or typed here. What a static analysis needs to know of a kernel it finds in
:class:`Program`: the parsed functions with their original line numbers, the sites, and what every
outside name stands for.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any

from ..errors import KernelError, OptionError
from .dialect import intrinsic_of
from .events import Site, SiteKind
from .flow import unsure_reads

__all__ = ["UNKNOWN", "Function", "Program", "program"]

#: What a name resolves to when it is a local variable, or nothing.
UNKNOWN = object()

_DIVIDES = (ast.FloorDiv, ast.Mod)

_DECLARE = ("shared.array", "local.array")
_BARRIERS = ("syncthreads", "syncthreads_count", "syncthreads_and", "syncthreads_or")


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """One function of the dialect: a kernel, or a device function that it calls.

    ``constants`` maps each outside name that the source mentions to its value at the time the
    source was read; ``variables`` are the names that are parameters or assigned; ``unsure`` are
    the reads of variables that some path through the source reaches without assigning them.
    """

    name: str
    filename: str
    tree: ast.FunctionDef
    parameters: tuple[str, ...]
    variables: frozenset[str]
    constants: Mapping[str, Any]
    lines: tuple[str, ...]
    unsure: tuple[ast.Name, ...] = ()

    @property
    def source(self) -> str:
        """The text of the whole file."""
        return "".join(self.lines)

    def resolve(self, node: ast.expr) -> Any:
        """Return the object that a name or dotted name stands for; UNKNOWN for a variable."""
        if isinstance(node, ast.Name) and node.id not in self.variables:
            return self.constants.get(node.id, UNKNOWN)
        if isinstance(node, ast.Attribute):
            owner = self.resolve(node.value)
            if owner is UNKNOWN or intrinsic_of(owner) not in (
                None,
                "",
                "shared",
                "local",
                "atomic",
            ):
                return UNKNOWN
            return getattr(owner, node.attr, UNKNOWN)
        return UNKNOWN

    def intrinsic(self, node: ast.expr) -> str | None:
        """Return the name under ``cuda`` that an expression stands for, such as "atomic.add"."""
        found = self.resolve(node)
        return None if found is UNKNOWN else intrinsic_of(found)

    def text(self, node: ast.AST) -> str:
        """Return the source of a node, up to the end of its first line."""
        start, end = self.span(node)
        return self.lines[getattr(node, "lineno", 1) - 1][start:end]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the columns of a node in its first line, in characters (ast counts bytes)."""
        line = self.lines[getattr(node, "lineno", 1) - 1].rstrip("\n")
        octets = line.encode()
        start = len(octets[: getattr(node, "col_offset", 0)].decode())
        if getattr(node, "end_lineno", None) != getattr(node, "lineno", None):
            return start, len(line)
        return start, len(octets[: getattr(node, "end_col_offset", 0)].decode())

    def error(self, node: ast.AST, message: str) -> KernelError:
        """Return the error that refuses a node, naming its line."""
        line = getattr(node, "lineno", self.tree.lineno)
        return KernelError(f"{self.filename}:{line}: in {self.name}: {message}")


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A kernel with the device functions it calls; what :func:`program` returns.

    Attributes
    ----------
    functions : tuple of Function
        The kernel first, then device functions in the order of their first mention.
    sites : tuple of Site
        Every place where memory is touched, a barrier stands, a branch is taken or something may
        go wrong, by id.
    removed : frozenset of int
        Ids of the barriers that are skipped, for an ablation.
    """

    functions: tuple[Function, ...]
    sites: tuple[Site, ...]
    removed: frozenset[int] = frozenset()
    _ids: Mapping[tuple[int, str], int] = field(default_factory=dict, repr=False)
    _by_object: Mapping[int, Function] = field(default_factory=dict, repr=False)
    #: Kernels rewritten for given argument types; kept here so that they live as long as this.
    specialisations: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def kernel(self) -> Function:
        """The function that is launched."""
        return self.functions[0]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.name

    @property
    def filename(self) -> str:
        """The file that holds the kernel."""
        return self.kernel.filename

    @property
    def tree(self) -> ast.FunctionDef:
        """The kernel's syntax tree, with the line numbers of its file."""
        return self.kernel.tree

    @property
    def parameters(self) -> tuple[str, ...]:
        """The kernel's parameter names."""
        return self.kernel.parameters

    @property
    def constants(self) -> Mapping[str, Any]:
        """The kernel's outside names and their values."""
        return self.kernel.constants

    def site(self, node: ast.AST, kind: SiteKind) -> Site | None:
        """Return the site of this kind at a node of one of the functions' trees."""
        number = self._ids.get((id(node), kind))
        return None if number is None else self.sites[number]

    def function(self, value: Any) -> Function | None:
        """Return the device function that a Python object stands for."""
        return self._by_object.get(id(_python_function(value)))

    def without_barrier(self, line: int) -> Program:
        """Return the same program with the barriers on one line taken out."""
        gone = {site.id for site in self.sites if site.kind == "barrier" and site.line == line}
        if not gone:
            lines = sorted({site.line for site in self.sites if site.kind == "barrier"})
            raise OptionError(
                f"{self.name} has no barrier on line {line}; its barriers stand on lines "
                f"{', '.join(map(str, lines)) or 'none'}"
            )
        return replace(self, removed=self.removed | gone, specialisations={})


def program(kernel: Any) -> Program:
    """Read a kernel's source; once for each function.

    Parameters
    ----------
    kernel : function, Program, Kernel or numba dispatcher
        A plain Python function of the dialect, or one decorated by ``jit``.

    Raises
    ------
    KernelError
        If its source cannot be read, or it or a function it calls is not of the dialect.
    """
    if isinstance(kernel, Program):
        return kernel
    function = _python_function(kernel)
    if not inspect.isfunction(function):
        raise KernelError(f"a kernel is a Python function; got {kernel!r}")
    known = _PROGRAMS.get(function)
    if known is None:
        known = _PROGRAMS[function] = _read_program(function)
    return known


_PROGRAMS: weakref.WeakKeyDictionary[Any, Program] = weakref.WeakKeyDictionary()


def _python_function(value: Any) -> Any:
    """Return the plain function inside a decorated one (numba's dispatchers have py_func too)."""
    return getattr(value, "py_func", value)


def _read_program(kernel: Callable[..., Any]) -> Program:
    functions: dict[int, Function] = {}
    calls: dict[int, dict[int, ast.Call]] = {}
    keep_alive = [kernel]
    for function in keep_alive:  # grows as device functions are met
        if id(function) in functions:
            continue
        read = functions[id(function)] = _read_function(function)
        called_here = calls[id(function)] = {}
        for node in (node for statement in read.tree.body for node in ast.walk(statement)):
            if isinstance(node, ast.Call):
                called = _python_function(read.resolve(node.func))
                if inspect.isfunction(called) and intrinsic_of(called) is None:
                    keep_alive.append(called)
                    called_here.setdefault(id(called), node)
    _refuse_recursion(functions, calls)
    sites: list[Site] = []
    ids: dict[tuple[int, str], int] = {}
    for read in functions.values():
        found = sorted(_sites(read), key=lambda item: (item[2].lineno, item[2].col_offset, item[1]))
        for node, kind, where, array in found:
            ids[id(node), kind] = len(sites)
            column, end_column = read.span(where)
            sites.append(
                Site(
                    id=len(sites),
                    kind=kind,
                    function=read.name,
                    filename=read.filename,
                    line=where.lineno,
                    column=column,
                    end_column=end_column,
                    text=read.text(where),
                    array=array,
                )
            )
    return Program(tuple(functions.values()), tuple(sites), _ids=ids, _by_object=functions)


def _refuse_recursion(
    functions: Mapping[int, Function], calls: Mapping[int, Mapping[int, ast.Call]]
) -> None:
    """Refuse functions that call themselves, be it by way of others."""
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        first, *through, _ = reversed(error.args[1])  # from caller to called
        names = [functions[number].name for number in through]
        way = f" by way of {', '.join(names)}" if names else ""
        raise functions[first].error(
            calls[first][through[0] if through else first],
            f"{functions[first].name} calls itself{way}; recursion is not supported: write a loop",
        ) from None


def _read_function(function: Any) -> Function:
    code = function.__code__
    try:
        lines, _ = inspect.findsource(code)
        source = "".join(lines)
        tree = _definition(source, code.co_firstlineno, code.co_name)
    except (OSError, SyntaxError) as error:
        raise KernelError(
            f"the source of {function.__qualname__} cannot be read ({error}); a kernel must be "
            "defined in a file or notebook cell"
        ) from None
    arguments = tree.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
        raise KernelError(
            f"{code.co_filename}:{tree.lineno}: {tree.name} must take plain positional parameters, "
            "without defaults, * or **"
        )
    parameters = tuple(item.arg for item in (*arguments.posonlyargs, *arguments.args))
    body = [node for statement in tree.body for node in ast.walk(statement)]
    names = [node for node in body if isinstance(node, ast.Name)]
    variables = {node.id for node in names if isinstance(node.ctx, ast.Store)}.union(parameters)
    outside = inspect.getclosurevars(function)
    scope = {**vars(builtins), **function.__globals__, **outside.nonlocals}
    return Function(
        name=tree.name,
        filename=code.co_filename,
        tree=tree,
        parameters=parameters,
        variables=frozenset(variables),
        constants={
            node.id: scope[node.id]
            for node in names
            if node.id in scope and node.id not in variables
        },
        lines=tuple(lines),
        unsure=unsure_reads(tree.body, parameters, frozenset(variables)),
    )


def _definition(source: str, line: int, name: str) -> ast.FunctionDef:
    """Find the function that starts (with its decorators) at a line of a file."""
    for node in ast.walk(_parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            start = min([node.lineno, *(item.lineno for item in node.decorator_list)])
            if start == line:
                return node
    raise OSError("it is not a function definition, or its file has changed since it was loaded")


@lru_cache(maxsize=16)
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


def _sites(function: Function) -> Iterator[tuple[ast.AST, SiteKind, ast.expr, str | None]]:
    """Yield (node, kind, the expression to show, array name) for every site of a function."""
    for read in function.unsure:
        yield read, "variable", read, None
    aliases = _aliases(function)

    def named(node: ast.expr) -> str | None:
        name = _array_name(node)
        return None if name in aliases else name

    inner: set[int] = set()  # A[i] within A[i][j], and targets of A[i] += 1
    for node in ast.walk(function.tree):
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, _DIVIDES):
            yield node, "division", node.value if isinstance(node, ast.AugAssign) else node, None
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
            yield node.target, "load", node.target, named(node.target)
        elif isinstance(node, ast.Subscript) and id(node) not in inner:
            chained = node.value
            while isinstance(chained, ast.Subscript):
                inner.add(id(chained))
                chained = chained.value
            if isinstance(chained, ast.Name) and chained.id in function.variables:
                kind: SiteKind = "load" if isinstance(node.ctx, ast.Load) else "store"
                yield node, kind, node, named(chained)
        elif isinstance(node, ast.Call):
            name = function.intrinsic(node.func) or ""
            if name.startswith("atomic.") and node.args:
                yield node, "atomic", node, named(node.args[0])
            elif name in _BARRIERS:
                yield node, "barrier", node, None
            elif function.resolve(node.func) is divmod:
                yield node, "division", node, None
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield node, "branch", node.test, None
        elif isinstance(node, ast.For):
            yield node, "branch", node.iter, None


def _aliases(function: Function) -> set[str]:
    """The names that are assigned something else than a new array, which may be an old one."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    for node in ast.walk(function.tree):
        if isinstance(node, ast.Assign):
            pairs += [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs.append((node.target, node.value))
    aliases: set[str] = set()
    for target, value in pairs:  # grows as tuples are met
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs += zip(target.elts, value.elts, strict=False)
        elif not (isinstance(value, ast.Call) and function.intrinsic(value.func) in _DECLARE):
            names = (n for n in ast.walk(target) if isinstance(n, ast.Name))
            aliases.update(name.id for name in names if isinstance(name.ctx, ast.Store))
    return aliases


def _array_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
