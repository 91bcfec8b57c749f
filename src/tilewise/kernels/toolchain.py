"""What the compilers are asked to do, and what they say about it.

Tile-level kernels go through Triton, thread-level ones through numba-cuda and nvJitLink. None needs
a GPU, and each is imported only when called. Which kernels there are, and where their code goes, is
`tilewise.kernels.compile`'s.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import subprocess
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.errors import KernelError, OptionError
from tilewise.kernels import TARGETS

if TYPE_CHECKING:
    from tilewise.kernels.compile import Variant

__all__ = [
    "PTX_ISA",
    "Made",
    "architecture",
    "compile_code",
    "compiler_version",
    "resource_usage",
    "source_key",
    "triton_or_refuse",
]

#: PTX that travels is of this instruction set: drivers of CUDA 12.0 and later compile it.
PTX_ISA = "8.0"

#: The SASS instructions worth counting: matrix units, FMA pipes, copies, shared memory, spills.
_COUNTED = (
    *("HGMMA", "IGMMA", "QGMMA", "HMMA", "IMMA", "QMMA", "DMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA"),
    *("FFMA", "FFMA2", "DFMA", "IMAD", "UTMALDG", "UTMASTG", "LDGSTS"),
    *("LDG", "STG", "LDS", "STS", "LDL", "STL"),
)

_NUMBER_BYTES = {
    **dict.fromkeys(("i1", "u1", "i8", "u8"), 1),
    **dict.fromkeys(("i16", "u16"), 2),
    **dict.fromkeys(("i32", "u32", "fp32"), 4),
    **dict.fromkeys(("i64", "u64", "fp64", "pointer"), 8),
}

#: Element types that Triton's metadata numbers otherwise than CUtensorMapDataType does: float32
#: without subnormals, float64, bfloat16. Source: TMA_DTYPE_DEVICE_TO_HOST in Triton's driver.
_MAP_TYPES = {8: 10, 9: 8, 10: 9}


@dataclass(kw_only=True)
class Made:
    """What a compiler made of one variant for one target.

    ``cubin`` is there for a PTX target too, for its report; ``warps`` counts the workers that warp
    specialisation added; ``parameters`` are `tilewise.kernels.Parameter` in the making.
    ``null_pointers`` follow the last of them: where Triton would pass scratch memory.
    """

    entry: str
    ptx: str
    cubin: bytes
    warps: int
    parameters: list[dict[str, Any]] = field(default_factory=list)
    null_pointers: int = 0
    shared_bytes: int = 0
    rewritten: int = 0


def compile_code(variant: Variant, target: str) -> Made:
    """Compile a variant for a target, and compare its parameters with what a launch would pass.

    Raises
    ------
    KernelError
        If the compiled kernel takes other parameters than the variant says.
    OptionError
        If the compiler is not installed.
    """
    if variant.compiler == "numba":
        made = _compile_numba(variant, target)
    else:
        made = _compile_triton(variant, target)
    passed = [size for parameter in made.parameters for size in _sizes(parameter)]
    passed += [8] * made.null_pointers
    declared = _declared_sizes(made)
    if passed != declared:
        raise KernelError(
            f"{variant.name}: the compiled kernel takes parameters of {declared} bytes, and a "
            f"launch would pass {passed}"
        )
    return made


def resource_usage(cubin: bytes, target: str) -> dict[str, Any]:
    """Return registers, stack, static shared memory and instruction counts, read by cuobjdump.

    Instructions are counted on Hopper alone: disassembling takes as long as compiling does. Spills
    need no count, since they take stack.
    """
    tool = triton_or_refuse().knobs.nvidia.cuobjdump.path

    def dump(flag: str) -> str:
        ran = subprocess.run([tool, flag, str(path)], capture_output=True, text=True, check=True)
        return ran.stdout

    with tempfile.TemporaryDirectory(prefix="tilewise-cuobjdump-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        usage = dump("-res-usage")
        sass = dump("-sass") if target == "sm_90a" else ""
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    names = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\w+)", sass, re.MULTILINE)
    assert found is not None, "cuobjdump changed what it prints of resources"
    assert names or not sass, "cuobjdump changed what it prints of code"
    registers, stack, shared, local = map(int, found.groups())
    # From Hopper on, the figure includes what the system keeps of a block's shared memory.
    reserved = 1024 if architecture(target) >= 90 else 0
    return {
        "static_shared_bytes": max(shared - reserved, 0),
        "registers": registers,
        "stack_bytes": stack + local,
        "instructions": {name: names.count(name) for name in _COUNTED if name in names},
    }


def source_key(variant: Variant, target: str) -> str:
    """Return a text that changes with anything the code of a variant depends on."""
    if variant.compiler == "numba":
        module = inspect.getmodule(_plain(variant.function))
        assert module is not None, f"{variant.name} is not in a module"
        return f"{inspect.getsource(module)} {variant.signature} {variant.options}"
    with _triton_set_up() as triton:
        environment = triton._C.libtriton.get_cache_invalidating_env_vars()
        return f"{_triton_source(variant).hash()} {_triton_options(variant, target)} {environment}"


@lru_cache
def compiler_version(compiler: str) -> str:
    """Return the names and versions of what compiles for ``compiler``."""
    packages = ("numba-cuda", "nvidia-nvjitlink") if compiler == "numba" else ("triton",)
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)


def architecture(target: str) -> int:
    """Return the number in a target's name."""
    return int(target.partition("_")[2].rstrip("a"))


def triton_or_refuse() -> Any:
    """Return the module ``triton``, or say what to install."""
    try:
        import triton
        import triton.backends.compiler
    except ImportError:
        raise OptionError(
            "compiling kernels takes Triton, which is not installed: pip install "
            "'tilewise[kernels]' (running compiled kernels does not take it)"
        ) from None
    return triton


def _compile_triton(variant: Variant, target: str) -> Made:
    with _triton_set_up() as triton:
        compiled = triton.compile(
            _triton_source(variant),
            target=triton.backends.compiler.GPUTarget("cuda", architecture(target), 32),
            options=_triton_options(variant, target),
        )
    metadata = compiled.metadata
    made = Made(
        entry=metadata.name,
        ptx=compiled.asm["ptx"],
        cubin=compiled.asm["cubin"],
        warps=metadata.num_warps,
        null_pointers=2,
        shared_bytes=metadata.shared,
    )
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise KernelError(
            f"{variant.name} wants {metadata.global_scratch_size} bytes of global scratch memory a "
            "block, which no launch here passes; make its tensor maps on the host"
        )
    if variant.rewrite_ptx is not None:
        made.ptx, made.rewritten = variant.rewrite_ptx(made.ptx, target)
        if made.rewritten:
            made.cubin = _assemble(made.ptx, target, fuse=variant.options["enable_fp_fusion"])
    maps = iter(metadata.tensordesc_meta or ())
    for name, kind in variant.signature.items():
        shape = re.match(r"tensordesc<\w+\[([^\]]*)\]", kind)
        if shape is None:
            made.parameters.append(
                {
                    "name": name,
                    "type": "pointer" if kind[0] == "*" else kind,
                    "divisible_by": variant.attrs.get(name, 1),
                }
            )
            continue
        encoding = next(maps, None)
        if encoding is None:
            raise KernelError(f"{variant.name}: {target} has no tensor maps, and {name} is one")
        made.parameters.append(
            {
                "name": name,
                "type": "tensor map",
                "rank": shape[1].count(",") + 1,
                "tensor_map": {
                    "data_type": _MAP_TYPES.get(encoding["elem_type"], encoding["elem_type"]),
                    "swizzle": encoding["swizzle"],
                    "block_size": encoding["block_size"],
                },
            }
        )
    return made


def _triton_source(variant: Variant) -> Any:
    if variant.compiler == "gluon":
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source
    names = variant.function.arg_names
    given = {**variant.signature, **dict.fromkeys(variant.constexprs, "constexpr")}
    if set(given) != set(names) or variant.signature.keys() & variant.constexprs.keys():
        raise KernelError(
            f"{variant.name}: the kernel takes {', '.join(names)}; signature names "
            f"{', '.join(variant.signature)} and constexprs {', '.join(variant.constexprs)}"
        )
    return Source(
        variant.function,
        {name: given[name] for name in names},
        constexprs=dict(variant.constexprs),
        attrs={
            (names.index(name),): [["tt.divisibility", factor]]
            for name, factor in variant.attrs.items()
        },
    )


def _triton_options(variant: Variant, target: str) -> dict[str, Any]:
    options = dict(sorted(variant.options.items()))
    if f"compute_{architecture(target)}" in TARGETS:  # a cubin has the PTX that travels behind it
        options["ptx_version"] = int(PTX_ISA.replace(".", ""))
    return options


@contextmanager
def _triton_set_up() -> Iterator[Any]:
    """Give Triton a cache of its own that is thrown away, and have it leave out line information.

    Line information triples the size of a cubin.
    """
    triton = triton_or_refuse()
    knobs = triton.knobs
    with (
        tempfile.TemporaryDirectory(prefix="tilewise-triton-") as folder,
        knobs.cache.scope(),
        knobs.compilation.scope(),
    ):
        knobs.cache.dir = folder
        knobs.compilation.disable_line_info = True
        yield triton


def _compile_numba(variant: Variant, target: str) -> Made:
    """Compile a thread-level kernel: numba-cuda makes PTX of it, and nvJitLink a cubin.

    nvJitLink and not ptxas, which merges neighbouring loads from shared memory: what `explain`
    counts in the source is then what the hardware counts (docs/facts.md).
    """
    cuda = _numba_cuda_or_refuse()
    ptx, _ = cuda.compile_ptx(
        _rebound(_plain(variant.function), cuda, {}),
        f"void({', '.join(variant.signature.values())})",
        cc=divmod(architecture(target), 10),
    )
    if target.startswith("compute_"):
        # NVVM states the newest instruction set it knows, whatever is used; what needs a newer one
        # than is stated here is refused by nvJitLink below.
        ptx = re.sub(r"(?m)^\.version \d+\.\d+", f".version {PTX_ISA}", ptx, count=1)
    entry = re.search(r"\.visible \.entry (\w+)\(", ptx)
    assert entry is not None, "numba-cuda gave PTX without an entry"
    made = Made(
        entry=entry[1],
        ptx=ptx,
        cubin=_link(ptx, target),
        warps=int(variant.options["num_warps"]),
    )
    for name, kind in variant.signature.items():
        array = re.fullmatch(r"\w+\[([^\]]*)\]", kind)
        number = re.fullmatch(r"(float|int|uint)(\d+)", kind)
        if array is not None:
            rank = array[1].count(",") + 1
            made.parameters.append({"name": name, "type": "array", "rank": rank})
        elif number is not None:
            letters = {"float": "fp", "int": "i", "uint": "u"}[number[1]]
            made.parameters.append({"name": name, "type": letters + number[2]})
        else:
            raise KernelError(f"{variant.name}: {name} is a {kind}, which no launch can pass")
    return made


def _rebound(
    function: Callable[..., Any], cuda: Any, done: dict[Callable[..., Any], Any]
) -> Callable[..., Any]:
    """Return a kernel whose ``cuda`` is numba's and whose callees are device functions."""
    from tilewise.simt import cuda as stand_in

    scope = dict(function.__globals__)
    copy = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__module__ = function.__module__
    for name in function.__code__.co_names:
        value = scope.get(name)
        if value is stand_in:
            scope[name] = cuda
        elif isinstance(value, types.FunctionType):
            if value not in done:
                # Inlined, since numba compiles a device function for the GPU of this machine only.
                done[value] = cuda.jit(_rebound(value, cuda, done), device=True, inline="always")
            scope[name] = done[value]
    return copy


def _plain(function: Any) -> Callable[..., Any]:
    """Return the Python function under a kernel's decorators."""
    plain: Callable[..., Any] = getattr(function, "py_func", function)
    return plain


def _assemble(ptx: str, target: str, *, fuse: bool) -> bytes:
    """Return the cubin that ptxas makes of PTX, with the flags that Triton gives it."""
    nvidia = triton_or_refuse().knobs.nvidia
    tool = nvidia.ptxas_blackwell if architecture(target) >= 90 else nvidia.ptxas
    with tempfile.TemporaryDirectory(prefix="tilewise-ptxas-") as folder:
        source, result = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        name = target.replace("compute_", "sm_")
        command = [tool.path, "--regAllocOptLevel=2", f"--gpu-name={name}"]
        if not fuse:
            command.append("--fmad=false")
        command += [str(source), "-o", str(result)]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            raise KernelError(f"ptxas refused the code for {target}: {ran.stderr.strip()}")
        return result.read_bytes()


def _link(ptx: str, target: str) -> bytes:
    """Return the cubin that nvJitLink makes of PTX."""
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=target.replace("compute_", "sm_"))
    return bytes(Program(ptx, "ptx", options).compile("cubin").code)


def _sizes(parameter: Mapping[str, Any]) -> list[int]:
    """Return the bytes of each value that a launch passes for a parameter."""
    kind, rank = parameter["type"], parameter.get("rank", 0)
    if kind == "tensor map":
        return [128, *[4] * rank, *[8] * rank]
    if kind == "array":
        return [8] * (5 + 2 * rank)
    if kind not in _NUMBER_BYTES:
        raise KernelError(f"{parameter['name']} is a {kind}, which no launch can pass")
    return [_NUMBER_BYTES[kind]]


def _declared_sizes(made: Made) -> list[int]:
    """Return the bytes of each parameter that the PTX declares."""
    declared = re.search(rf"\.entry {re.escape(made.entry)}\((.*?)\)", made.ptx, re.DOTALL)
    assert declared is not None
    sizes = []
    for line in re.findall(r"\.param([^,\n]*)", declared[1]):
        bits = re.search(r"\.[a-z](\d+)\b", re.sub(r"\.align\s+\d+", "", line))
        count = re.search(r"\[(\d+)\]", line)
        assert bits is not None
        sizes.append(int(bits[1]) // 8 * (int(count[1]) if count else 1))
    return sizes


def _numba_cuda_or_refuse() -> Any:
    cuda: Any = None
    with suppress(ImportError):
        from numba import cuda
    if not hasattr(cuda, "compile_ptx"):
        raise OptionError(
            "compiling thread-level kernels takes numba-cuda, which is not installed: pip install "
            "'tilewise[kernels]'"
        )
    return cuda
