"""How many blocks of a kernel a multiprocessor holds at once, and what limits them.

Here stand the limits of each target and the arithmetic of ncu's ``launch__occupancy_limit_*``.
Where the numbers come from is in docs/facts.md; what to do about a limit is ``explain``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tilewise.errors import OptionError

__all__ = ["TARGETS", "Limit", "Occupancy", "Target", "occupancy"]

Limit = Literal["blocks", "warps", "registers", "shared_mem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The resources of one multiprocessor and the granularity in which they are given out.

    Sizes are in bytes, registers in 32-bit words. ``register_unit`` is given to a warp, or to a
    block where ``half_warps``, which marks the guide's own hardware (compute capability 1.x).
    ``carveouts`` are the sizes to which shared memory can be set, in KiB, largest last;
    ``shared_reserved`` is what the system keeps of it for every block.
    """

    name: str
    max_warps: int
    max_blocks: int
    carveouts: tuple[int, ...]
    max_threads_per_block: int = 1024
    registers: int = 65536
    max_registers_per_thread: int = 255
    register_unit: int = 256
    warp_unit: int = 4
    shared_unit: int = 128
    shared_reserved: int = 1024
    half_warps: bool = False

    @property
    def shared_bytes(self) -> int:
        """The most shared memory that all blocks of a multiprocessor have together."""
        return self.carveouts[-1] * 1024

    @property
    def shared_bytes_per_block(self) -> int:
        """The most shared memory that one block can have."""
        return self.shared_bytes - self.shared_reserved


_ADA_CARVEOUTS = (0, 8, 16, 32, 64, 100)
_HOPPER_CARVEOUTS = (0, 8, 16, 32, 64, 100, 132, 164, 196, 228)


def _guide(name: str, max_warps: int, registers: int, register_unit: int) -> Target:
    return Target(
        name=name,
        max_warps=max_warps,
        max_blocks=8,
        carveouts=(16,),
        max_threads_per_block=512,
        registers=registers,
        max_registers_per_thread=128,
        register_unit=register_unit,
        warp_unit=2,
        shared_unit=512,
        shared_reserved=0,
        half_warps=True,
    )


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _guide("sm_10", 24, 8192, 256),
        _guide("sm_11", 24, 8192, 256),
        _guide("sm_12", 32, 16384, 512),
        _guide("sm_13", 32, 16384, 512),
        Target(
            name="sm_80",
            max_warps=64,
            max_blocks=32,
            carveouts=(0, 8, 16, 32, 64, 100, 132, 164),
        ),
        Target(name="sm_86", max_warps=48, max_blocks=16, carveouts=_ADA_CARVEOUTS),
        Target(name="sm_89", max_warps=48, max_blocks=24, carveouts=_ADA_CARVEOUTS),
        Target(name="sm_90", max_warps=64, max_blocks=32, carveouts=_HOPPER_CARVEOUTS),
        Target(name="sm_100", max_warps=64, max_blocks=32, carveouts=_HOPPER_CARVEOUTS),
        Target(name="sm_120", max_warps=48, max_blocks=24, carveouts=_ADA_CARVEOUTS),
    )
}


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How many blocks fit, by each limit and together.

    ``limits`` holds ncu's ``launch__occupancy_limit_blocks``, ``_warps``, ``_registers`` and
    ``_shared_mem``: the blocks that each resource alone would allow. ``limited_by`` are those
    that allow no more than ``blocks``; registers that are not known are not among them.
    """

    target: str
    threads: int
    registers: int | None
    shared_bytes: int
    limits: dict[Limit, int]
    blocks: int
    warps: int
    max_warps: int

    @property
    def fraction(self) -> float:
        """Resident warps over the most there can be: ``sm__maximum_warps_per_active_cycle_pct``."""
        return self.warps / self.max_warps

    @property
    def limited_by(self) -> tuple[Limit, ...]:
        known = (name for name in self.limits if name != "registers" or self.registers)
        return tuple(name for name in known if self.limits[name] == self.blocks)


def occupancy(
    threads: int,
    *,
    registers: int | None = None,
    shared_bytes: int = 0,
    target: str = "sm_90",
    carveout_kib: int | None = None,
) -> Occupancy:
    """Return how many blocks of ``threads`` threads one multiprocessor holds at once.

    Parameters
    ----------
    threads : int
        Threads of a block.
    registers : int, optional
        Registers a thread, as the compiled kernel has them; unknown ones limit nothing.
    shared_bytes : int
        Shared memory of a block, static and dynamic, without what the system reserves.
    target : str
        A name of ``TARGETS``.
    carveout_kib : int, optional
        How much of the L1 cache is shared memory. The driver picks it for each kernel; left
        out, it is the largest, which is what the driver can pick where it would help.

    Raises
    ------
    OptionError
        An unknown target or carve-out, or a block that no multiprocessor can hold.
    """
    machine = TARGETS.get(target)
    if machine is None:
        raise OptionError(f"target {target!r} is not known; known are {', '.join(TARGETS)}")
    if not 0 < threads <= machine.max_threads_per_block:
        raise OptionError(
            f"a block of {threads} threads cannot be launched on {target}: "
            f"1 to {machine.max_threads_per_block} can"
        )
    if shared_bytes > machine.shared_bytes_per_block:
        raise OptionError(
            f"{shared_bytes} bytes of shared memory a block are more than the "
            f"{machine.shared_bytes_per_block} of {target}"
        )
    carveout = machine.carveouts[-1] if carveout_kib is None else carveout_kib
    if carveout not in machine.carveouts:
        sizes = ", ".join(map(str, machine.carveouts))
        raise OptionError(f"shared memory on {target} can be {sizes} KiB, not {carveout}")

    warps = -(-threads // 32)
    limits: dict[Limit, int] = {
        "blocks": machine.max_blocks,
        "warps": machine.max_warps // warps,
        "registers": _by_registers(machine, warps, registers),
        "shared_mem": _by_shared(machine, shared_bytes, carveout * 1024),
    }
    blocks = min(limits.values())
    return Occupancy(
        target=target,
        threads=threads,
        registers=registers,
        shared_bytes=shared_bytes,
        limits=limits,
        blocks=blocks,
        warps=blocks * warps,
        max_warps=machine.max_warps,
    )


def _by_registers(machine: Target, warps: int, registers: int | None) -> int:
    if not registers:
        return machine.max_blocks
    if machine.half_warps:
        block = _round_up(
            _round_up(warps, machine.warp_unit) * 32 * registers, machine.register_unit
        )
        return machine.registers // block
    a_warp = _round_up(registers * 32, machine.register_unit)
    resident = machine.registers // a_warp // machine.warp_unit * machine.warp_unit
    return resident // warps


def _by_shared(machine: Target, shared_bytes: int, carveout_bytes: int) -> int:
    block = _round_up(shared_bytes + machine.shared_reserved, machine.shared_unit)
    return carveout_bytes // block if block else machine.max_blocks


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
