"""Launching a kernel: arguments, groups of blocks, and what lanes do together.

Blocks are run in groups, as many at once as fill the processor's cache: all lanes of a group walk
through the rewritten kernel together (see :mod:`.frontend`). Blocks of a launch are independent but
for global memory, which later groups find as earlier ones have left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import KernelError, OptionError
from . import warps
from .arguments import Geometry, bind, describe_arguments
from .events import ArrayInfo, Barrier, Fault, FaultKind, Launch, Observer, Site
from .frontend import specialise
from .lanes import Mask
from .program import Program, program
from .storage import Index, Storage, poison
from .typing_rules import dtype_of
from .values import Specialisation

__all__ = ["MAX_STEPS", "Kernel", "launch"]

#: Loop iterations that a group of blocks may do before a kernel is taken to be endless.
MAX_STEPS = 1_000_000

#: Lanes that run together. Measured: 12,288 lanes keep the arrays of float64 temporaries below the
#: 128 KiB at which the C library starts to map fresh pages for each (15 ns a lane instead of 6).
_LANES = 12_288

_SHARED_LIMIT = 48 * 1024
#: Of a thread (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
_LOCAL_LIMIT = 512 * 1024
#: What the local arrays of blocks that run together may take, where there is more than one.
_LOCAL_TOGETHER = 256 << 20


def launch(
    kernel: Any,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    *arguments: Any,
    observer: Observer | None = None,
    blocks: Iterable[int] | None = None,
    max_steps: int = MAX_STEPS,
) -> None:
    """Run a kernel, as ``kernel[grid, block](*arguments)`` does on a GPU, and wait for it.

    Parameters
    ----------
    kernel : function, Program, Kernel or numba dispatcher
        The kernel, in the numba-cuda dialect of Python.
    grid, block : int or sequence of 1 to 3 ints
        Blocks of the grid and threads of a block, in x, y, z.
    *arguments : ndarray or number
        NumPy arrays of bool, integers or floats, read and written in place, and numbers. A Python
        int is an int64 and a Python float a float64, as for numba.
    observer : Observer, optional
        Reads along: see :mod:`.events`.
    blocks : iterable of int, optional
        Run only the blocks with these linear ids (x + y·Gx + z·Gx·Gy).
    max_steps : int
        Loop iterations that a group of blocks may do before the kernel is taken to be endless.

    Raises
    ------
    KernelError
        For a construct outside the dialect, before anything runs; for an access out of range, a
        barrier that some threads miss, or an endless loop, naming line, block and thread.
    OptionError
        For a grid, block or list of blocks that cannot be launched.
    """
    source = program(kernel)
    geometry = Geometry.of(grid, block)
    if type(max_steps) is not int or max_steps < 1:
        raise OptionError(f"max_steps={max_steps!r} must be an integer of 1 or more")
    ids = geometry.block_ids(blocks)
    types, values = bind(source, arguments)
    with np.errstate(all="ignore"):  # constants are converted here
        spec = specialise(source, types)
    if spec.shared_bytes > _SHARED_LIMIT:
        raise KernelError(
            f"{source.filename}:{source.tree.lineno}: {source.name} declares {spec.shared_bytes} "
            f"bytes of shared memory; a block may declare {_SHARED_LIMIT} (48 KiB)"
        )
    infos = describe_arguments(source, values)
    declared = [
        ArrayInfo(
            name=item.name,
            space=item.space,
            dtype=dtype_of(item.type),
            shape=item.shape,
            strides=np.empty(item.shape, dtype_of(item.type)).strides,
            base=item.base,
            nbytes=int(np.prod(item.shape)) * dtype_of(item.type).itemsize,
        )
        for item in spec.declarations.values()
    ]
    local_bytes = sum(info.nbytes for info in declared if info.space == "local")
    if local_bytes > _LOCAL_LIMIT:
        raise KernelError(
            f"{source.filename}:{source.tree.lineno}: {source.name} declares {local_bytes} bytes "
            f"of local arrays; a thread may have {_LOCAL_LIMIT} (512 KiB)"
        )
    if observer is not None:
        observer.on_launch(
            Launch(
                kernel=source.name,
                filename=source.filename,
                grid=geometry.grid,
                block=geometry.block,
                arrays=(*(info for info in infos if info is not None), *declared),
                scalars={
                    name: value
                    for name, value, info in zip(source.parameters, values, infos, strict=True)
                    if info is None
                },
                sites=source.sites,
                shared_bytes=spec.shared_bytes,
                notes=tuple(spec.notes),
            )
        )
    lanes = min(_LANES, _LOCAL_TOGETHER // max(local_bytes, 1))
    together = max(1, lanes // geometry.threads)
    with np.errstate(all="ignore"):
        for start in range(0, len(ids), together):
            group = np.asarray(ids[start : start + together], np.int64)
            machine = Machine(source, spec, geometry, group, declared, observer, max_steps)
            held = [
                value if info is None else Storage(machine, info, value)
                for value, info in zip(values, infos, strict=True)
            ]
            spec.entry(machine, None, *held)


class Kernel:
    """A function that is launched as ``kernel[grid, block](*arguments)``, as numba's are."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.py_func = function
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self.__module__ = function.__module__

    def __repr__(self) -> str:
        return f"<kernel {self.__module__}.{self.__name__}>"

    def __getitem__(self, configuration: Any) -> Callable[..., None]:
        if not isinstance(configuration, tuple) or not 2 <= len(configuration) <= 4:
            raise OptionError(f"launch {self.__name__} as kernel[grid, block](...)")
        grid, block, *rest = configuration
        if len(rest) == 2 and rest[1]:
            raise OptionError(
                "dynamic shared memory is not supported; declare arrays of known shape"
            )
        return lambda *arguments: launch(self, grid, block, *arguments)

    def __call__(self, *_: Any) -> NoReturn:
        raise KernelError(
            f"{self.__name__} is a kernel: launch it as {self.__name__}[grid, block](...)"
        )


class Machine:
    """The state of one group of blocks; rewritten kernels know it as M.

    ``lanes`` is the shape of everything that has a value for each lane: blocks, then the axes of a
    block that are longer than 1, slowest first.
    """

    def __init__(
        self,
        source: Program,
        spec: Specialisation,
        geometry: Geometry,
        blocks: NDArray[np.int64],
        declared: Sequence[ArrayInfo],
        observer: Observer | None,
        max_steps: int,
    ) -> None:
        self.blocks = blocks
        self.sites: tuple[Site, ...] = source.sites
        self.filename = source.filename
        self.observer = observer
        self.threads = geometry.threads
        self.geometry = geometry
        self.blockDim, self.gridDim = geometry.block, geometry.grid
        self.lanes = (len(blocks), *geometry.axes)
        #: The lanes that have returned from the kernel; None while there are none.
        self.gone: NDArray[np.bool_] | None = None
        self.interval = np.zeros(len(blocks), np.int64)
        self.warp_interval = np.zeros((len(blocks), -(-self.threads // 32)), np.int64)
        #: What `Access.some_lanes` says, as (2, blocks, warps, 32).
        self.some_lanes: NDArray[np.int64] | None = None
        self._declared = declared
        self._steps_left, self._max_steps = max_steps, max_steps

    # -- where a lane is

    @cached_property
    def threadIdx(self) -> tuple[NDArray[np.int64], ...]:
        """x, y and z of the thread, each along its own axis."""
        axes = self.geometry.axes
        found = []
        for place in range(3):
            shape = [1] * (len(axes) + 1)
            if place < len(axes):
                shape[-1 - place] = axes[-1 - place]
            found.append(np.arange(shape[-1 - place] if place < len(axes) else 1).reshape(shape))
        return tuple(found)

    @cached_property
    def largest(self) -> dict[int, int]:
        """The largest element of arrays that live as long as this, by id: no need to search it."""
        return {id(axis): axis.size - 1 for axis in self.threadIdx}

    @cached_property
    def blockIdx(self) -> tuple[NDArray[np.int64], ...]:
        """x, y and z of the block."""
        shape = (-1, *(1 for _ in self.geometry.axes))
        width, height, _ = self.gridDim
        parts = (self.blocks % width, self.blocks // width % height, self.blocks // width // height)
        return tuple(part.reshape(shape) for part in parts)

    @cached_property
    def grid(self) -> tuple[NDArray[np.int64], ...]:
        """The thread's place in the whole grid."""
        triples = zip(self.blockIdx, self.blockDim, self.threadIdx, strict=True)
        return tuple(block * extent + thread for block, extent, thread in triples)

    @property
    def gridsize(self) -> tuple[int, ...]:
        """Threads of the whole grid, in x, y and z."""
        return tuple(g * b for g, b in zip(self.gridDim, self.blockDim, strict=True))

    @cached_property
    def _linear(self) -> NDArray[np.int64]:
        return np.arange(self.threads).reshape((1, *self.geometry.axes))

    @cached_property
    def lane(self) -> NDArray[np.int64]:
        """The thread's lane in its warp."""
        return self._linear % 32

    @cached_property
    def lanes_below(self) -> NDArray[np.uint64]:
        """The lanes of the warp below this one, as bits."""
        return ((np.int64(1) << self.lane) - 1).astype(np.uint64)

    def full(self, value: Any) -> NDArray[Any]:
        """Return a value for each thread: (blocks, threads in linear order)."""
        return np.broadcast_to(value, self.lanes).reshape(len(self.blocks), self.threads)

    # -- arrays of the block and of the thread

    def shared(self, number: int) -> Storage:
        """Return the storage of a shared array; every use of a declaration is the same array."""
        owner = np.arange(len(self.blocks)).reshape((-1, *(1 for _ in self.geometry.axes)))
        return self._storage(number, len(self.blocks), owner)

    def local(self, number: int) -> Storage:
        """Return the storage of a local array."""
        owners = len(self.blocks) * self.threads
        return self._storage(number, owners, np.arange(owners).reshape(self.lanes))

    def _storage(self, number: int, owners: int, owner: NDArray[np.int64]) -> Storage:
        known: dict[int, Storage] = self.__dict__.setdefault("_arrays", {})
        if number not in known:
            info = self._declared[number]
            data = np.full((owners, int(np.prod(info.shape))), poison(info.dtype), info.dtype)
            known[number] = Storage(self, info, data, owner)
        return known[number]

    # -- loops

    def tick(self, line: int) -> bool:
        """Count one iteration of a loop."""
        self._steps_left -= 1
        if self._steps_left < 0:
            raise KernelError(
                f"{self.filename}:{line}: this loop is still going after {self._max_steps} "
                "iterations in all and is taken to be endless; pass a larger max_steps to "
                "tilewise.simt.launch if it is not"
            )
        return True

    def range(self, line: int, start: int, stop: int, step: int) -> Iterable[int]:
        """Return ``range(start, stop, step)``, its iterations counted."""
        if step == 0:
            raise KernelError(f"{self.filename}:{line}: range with a step of 0 never ends")
        values = range(start, stop, step)
        count = max(0, -(-(stop - start) // step))  # len() of a long range overflows
        if count < self._steps_left // 16:
            self._steps_left -= count
            return values
        return self._counted(line, values)

    def _counted(self, line: int, values: Iterable[int]) -> Iterator[int]:
        for value in values:
            self.tick(line)
            yield value

    def trips(self, line: int, mask: Mask, start: Index, stop: Index, step: Index) -> Any:
        """Return how often each lane goes round a loop over ``range(start, stop, step)``."""
        steps: NDArray[np.int64] = np.asarray(step, np.int64)
        stuck = np.equal(steps, 0)
        if np.any(stuck if mask is None else stuck & mask):
            raise KernelError(f"{self.filename}:{line}: range with a step of 0 never ends")
        steps = np.where(stuck, 1, steps)
        distance = np.asarray(stop) - np.asarray(start)
        return np.maximum(-(-distance // steps), 0)

    def most(self, mask: Mask, trips: NDArray[np.int64]) -> int:
        """Return the largest number of trips of any lane of a mask."""
        return int(np.max(trips if mask is None else np.where(mask, trips, 0)))

    # -- leaving, and waiting for each other

    def leave(self, mask: Mask) -> None:
        """Note that lanes have returned from the kernel."""
        left = np.broadcast_to(True if mask is None else mask, self.lanes)
        self.gone = left if self.gone is None else self.gone | left

    def barrier(self, site: int, mask: Mask) -> None:
        """Wait at a block barrier; an error where a block's live threads are not all there."""
        if mask is None and self.observer is None:
            self.interval += 1
            return
        arrived = self.full(True if mask is None else mask)
        live = self.full(True if self.gone is None else ~self.gone)
        here: NDArray[np.bool_] = np.any(arrived, axis=1)
        missing = live & ~arrived & here[:, None]
        if missing.any():
            self._diverged(site, arrived, missing)
        if self.observer is not None and here.any():
            event = (self.blocks[here], arrived[here], live[here], self.interval[here])
            self.observer.on_barrier(Barrier(self.sites[site], *event))
        self.interval = self.interval + here

    def counted(self, how: str, site: int, mask: Mask, condition: Any, removed: bool) -> Any:
        """Wait at a barrier that also counts, or joins, a condition over the block's threads."""
        if not removed:
            self.barrier(site, mask)
        says = self.full(condition)
        if mask is not None:
            here = self.full(mask)
            says = says | ~here if how == "and" else says & here
        total = {"count": says.sum(1), "and": says.all(1), "or": says.any(1)}[how]
        return total.astype(np.int64).reshape((-1, *(1 for _ in self.geometry.axes)))

    shuffle = warps.shuffle
    vote = warps.vote
    syncwarp = warps.syncwarp
    active_lanes = warps.active_lanes

    # -- faults

    def place(self, site: int) -> str:
        """Return where a site is, for a message."""
        found = self.sites[site]
        return f"{found.filename}:{found.line}: in {found.function}: {found.text}"

    def block_name(self, position: int) -> tuple[int, ...]:
        """Return (x, y, z) of a block of the group."""
        return tuple(int(axis.reshape(-1)[position]) for axis in self.blockIdx)

    def thread_name(self, thread: int) -> tuple[int, int, int]:
        """Return (x, y, z) of a thread, given its linear number."""
        width, height, _ = self.blockDim
        return thread % width, thread // width % height, thread // width // height

    def out_of_range(
        self, site: int, info: ArrayInfo, outside: NDArray[np.bool_], index: tuple[Index, ...]
    ) -> None:
        """Report lanes that ask for elements an array does not have."""
        offenders = self.full(outside)
        asked = tuple(self.full(np.asarray(position, np.int64)) for position in index)
        block, thread = (int(axis[0]) for axis in np.nonzero(offenders))
        which = [int(axis[block, thread]) for axis in asked]
        verb = {"load": "reads", "store": "writes"}.get(self.sites[site].kind, "updates")
        others = int(offenders.sum()) - 1
        message = (
            f"{self.place(site)} {verb} out of range: thread {self.thread_name(thread)} of block "
            f"{self.block_name(block)} asks for {info.name}[{', '.join(map(str, which))}], and "
            f"{info.name} has shape {info.shape}"
        )
        if others:
            message += f" ({others} other thread{'s' * (others > 1)} here likewise)"
        if min(which) < 0:
            message += "; a negative index does not count from the end here, as on the GPU none may"
        self._fault(Fault(self.sites[site], info, self.blocks, offenders, asked, message=message))

    def divide(self, site: int, mask: Mask, divisor: Any) -> None:
        """Tell who reads along of lanes that divide an integer by 0; for them the result is 0."""
        if self.observer is None:
            return
        zero = np.equal(divisor, 0)
        if not np.any(zero if mask is None else zero & mask):
            return
        offenders = zero if mask is None else zero & mask
        message = f"{self.place(site)} divides by 0"
        self._tell("division by zero", site, None, offenders, (), message)

    def assigned(self, site: int, mask: Mask, assigned: Any) -> None:
        """Tell who reads along of lanes that read a variable before they assign it; it holds 0."""
        if self.observer is None:
            return
        unassigned = np.logical_not(assigned)
        offenders = unassigned if mask is None else unassigned & mask
        if np.any(offenders):
            message = f"{self.place(site)} is read before anything is assigned to it"
            self._tell("unassigned variable", site, None, offenders, (), message)

    def unwritten(
        self, site: int, info: ArrayInfo, fresh: NDArray[np.bool_], index: tuple[Index, ...]
    ) -> None:
        """Tell who reads along of lanes that read an element of a local array nobody wrote."""
        asked = tuple(self.full(np.asarray(position, np.int64)) for position in index)
        message = f"{self.place(site)} reads an element of {info.name} that was not written"
        self._tell("uninitialised read", site, info, fresh, asked, message)

    def _tell(
        self,
        reason: FaultKind,
        site: int,
        info: ArrayInfo | None,
        offenders: NDArray[np.bool_],
        indices: tuple[NDArray[np.int64], ...],
        message: str,
    ) -> None:
        """Report what is no error of the machine."""
        assert self.observer is not None
        where, active = self.sites[site], self.full(offenders)
        self.observer.on_fault(Fault(where, info, self.blocks, active, indices, reason, message))

    def _diverged(self, site: int, arrived: NDArray[np.bool_], missing: NDArray[np.bool_]) -> None:
        block, thread = (int(axis[0]) for axis in np.nonzero(missing))
        waiting = int(np.argmax(arrived[block]))
        message = (
            f"{self.place(site)}: only {int(arrived[block].sum())} of block "
            f"{self.block_name(block)}'s live threads reach this barrier: thread "
            f"{self.thread_name(waiting)} waits there, thread {self.thread_name(thread)} has not "
            "exited and is elsewhere; the condition around a barrier must be the same for all "
            "threads of a block"
        )
        reason: FaultKind = "barrier divergence"
        self._fault(Fault(self.sites[site], None, self.blocks, missing, (), reason, message))

    def _fault(self, fault: Fault) -> None:
        if self.observer is None or not self.observer.on_fault(fault):
            raise KernelError(fault.message)
