"""Pictures of a whole launch as inline SVG: traffic, roofline, barriers and races, thread map.

Drawn like those of :mod:`.svg`, which has the pictures of one request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from . import words
from .report import ArrayRow, Finding, Interval, Place, Report, Roofs, ThreadMap
from .svg import Picture, drawing, tag, text_at, thread_of_lane

__all__ = ["bars", "roofline", "thread_map", "timeline", "traffic"]

# Intervals between barriers that are drawn in full; more are only counted.
_INTERVALS = 4
# What can go wrong in a race, by its kind: second thread, first thread.
_RACES = {
    "read-after-write": "{} need not wait for {}: it may read before the other has written.",
    "write-after-read": "{} need not wait for {}: it may overwrite what the other has yet to read.",
    "write-after-write": "{} need not wait for {}: which of them writes last is left to chance.",
}


def bars(rows: Sequence[tuple[str, float, str]], *, label: str, marked: int | None = None) -> str:
    """Horizontal bars from (label, number, text), as wide as the page; one of them marked."""
    line = 42
    most = max((number for _, number, _ in rows), default=0) or 1
    parts: list[str] = []
    for i, (name, number, text) in enumerate(rows):
        y = i * line
        value = tag("tspan", escape(text), dx=10, class_="strong")
        share = f"{max(0.4, 100 * number / most):.1f}%"
        style = "bar marked" if i == marked else "bar"
        parts.append(tag("text", f"{escape(name)}{value}", x=0, y=y + 14))
        parts.append(tag("rect", x=0, y=y + 19, width=share, height=14, class_=style))
    return tag(
        "svg", parts, width="100%", height=len(rows) * line, role="img", aria_label=label,
        class_="bars",
    )  # fmt: skip


def traffic(report: Report) -> Picture | None:
    """Draw the bytes that must be moved, are moved, and would be without shared memory."""
    if not report.traffic:
        return None
    least = max(1, min(bar.bytes for bar in report.traffic))
    rows = [
        (bar.label, float(bar.bytes), _times(words.bytes_of(bar.bytes), bar.bytes / least))
        for bar in sorted(report.traffic, key=lambda bar: bar.bytes)
    ]
    ordered = sorted(report.traffic, key=lambda bar: bar.bytes)
    most = ordered[-1]
    sentence = (
        f"{most.label[0].upper()}{most.label[1:]}: {words.bytes_of(most.bytes)}, "
        f"{words.ratio(most.bytes / least)} times {ordered[0].label}."
        if most.bytes > least
        else f"All of it is what must be moved: {words.bytes_of(least)}."
    )
    return Picture(
        title="Traffic with global memory",
        sentence=sentence,
        svg=bars(rows, label=f"Bars of bytes. {sentence}"),
        columns=("", "bytes", "what it is"),
        rows=tuple((b.label, words.count(b.bytes), b.detail) for b in ordered),
    )


def roofline(report: Report) -> Picture | None:
    """Draw the roofs over arithmetic intensity, and where this kernel ends at best."""
    roofs = report.roofs
    if roofs is None or not roofs.peak_tflops or not roofs.bandwidth_tbs:
        return None
    reach = min((roof.tflops for roof in roofs.roofs if roof.tflops is not None), default=0.0)
    if not reach or not roofs.intensity:
        return None
    plane = _LogPlane.around(roofs, reach)
    parts = [*plane.axes()]
    ridge = roofs.peak_tflops / roofs.bandwidth_tbs
    low, high = plane.x_range
    roof = f"M{plane.x(low):.1f} {plane.y(low * roofs.bandwidth_tbs):.1f}"
    roof += f"L{plane.x(ridge):.1f} {plane.y(roofs.peak_tflops):.1f}H{plane.x(high):.1f}"
    parts.append(tag("path", d=roof, class_="roof"))
    said = f"float32 peak {roofs.peak_tflops:.1f} TFLOP/s"
    at_y = plane.y(roofs.peak_tflops) - 7
    parts.append(text_at(plane.x(high) - 4, at_y, said, "end small"))
    x, y = plane.along(roofs.bandwidth_tbs)
    said = f"memory {roofs.bandwidth_tbs:g} TB/s"
    turn = f"rotate({plane.slope():.1f} {x:.1f} {y:.1f})"
    parts.append(text_at(x, y - 7, said, "small", transform=turn))
    flat = [
        each
        for each in roofs.roofs
        if each.tflops is not None and each.name not in ("memory", "float arithmetic")
    ]
    for each in flat:
        assert each.tflops is not None
        y = plane.y(each.tflops)
        binds = each.name == roofs.binding
        style = "ceiling binds" if binds else "ceiling"
        parts.append(
            tag("path", d=f"M{plane.x(low):.1f} {y:.1f}H{plane.x(high):.1f}", class_=style)
        )
        said = f"{each.name} {each.tflops:.1f}{', binds' if binds else ''}"
        parts.append(text_at(plane.x(high) - 4, y - 6, said, "end small"))
    x, y = plane.x(roofs.intensity), plane.y(reach)
    parts.append(tag("path", d=f"M{x:.1f} {plane.bottom}V{y:.1f}", class_="drop"))
    parts.append(tag("circle", cx=x, cy=y, r=6, class_="point"))
    at = f"{report.kernel}: at most {reach:.1f} TFLOP/s"
    parts.append(text_at(x + 11, y + 17, at, "strong"))
    sentence = (
        "Across, how much is computed for each byte that must be moved; up, the speed. A kernel "
        f"lies below every line: {report.kernel} at most where the dot is."
    )
    return Picture(
        title=f"Roofline of {roofs.device}",
        sentence=sentence,
        svg=drawing(plane.width, plane.height, parts, label=f"Roofline. {sentence}"),
        columns=("roof", "share of the float peak", "TFLOP/s", "worked out from"),
        rows=tuple(
            (
                r.name,
                words.percent(r.fraction),
                "–" if r.tflops is None else f"{r.tflops:.1f}",
                r.detail,
            )
            for r in roofs.roofs
        ),
    )


class _LogPlane:
    """Logarithmic axes: intensity across, TFLOP/s up."""

    width, height, left, top, bottom, right = 640, 380, 64, 18, 330, 622

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self.x_range, self.y_range = x_range, y_range

    @classmethod
    def around(cls, roofs: Roofs, reach: float) -> _LogPlane:
        assert roofs.peak_tflops is not None
        assert roofs.bandwidth_tbs is not None
        ridge = roofs.peak_tflops / roofs.bandwidth_tbs
        low = min(roofs.intensity, ridge) / 8
        high = max(roofs.intensity, ridge) * 8
        bottom = min(reach, low * roofs.bandwidth_tbs) / 1.5
        return cls((low, high), (bottom, roofs.peak_tflops * 1.8))

    def x(self, intensity: float) -> float:
        low, high = self.x_range
        share = math.log(intensity / low) / math.log(high / low)
        return self.left + (self.right - self.left) * share

    def y(self, tflops: float) -> float:
        low, high = self.y_range
        share = math.log(tflops / low) / math.log(high / low)
        return self.bottom - (self.bottom - self.top) * share

    def along(self, bandwidth: float) -> tuple[float, float]:
        """A point on the memory roof where its name has room."""
        at = self.x_range[0] * 1.4
        return self.x(at), self.y(at * bandwidth)

    def slope(self) -> float:
        """The angle of the memory roof, in degrees."""
        (low, high), (least, most) = self.x_range, self.y_range
        across = (self.right - self.left) / math.log(high / low)
        up = (self.bottom - self.top) / math.log(most / least)
        return -math.degrees(math.atan2(up, across))

    def axes(self) -> Iterable[str]:
        path = f"M{self.left} {self.top}V{self.bottom}H{self.right}"
        yield tag("path", d=path, class_="axis")
        for at in _ticks(*self.x_range):
            yield text_at(self.x(at), self.bottom + 16, f"{at:g}", "middle small")
            yield tag("path", d=f"M{self.x(at):.1f} {self.bottom}v4", class_="axis")
        for at in _ticks(*self.y_range):
            yield text_at(self.left - 8, self.y(at) + 4, f"{at:g}", "end small")
            yield tag("path", d=f"M{self.left} {self.y(at):.1f}H{self.right}", class_="grid")
        middle = (self.left + self.right) / 2
        said = "flops a byte of compulsory traffic"
        yield text_at(middle, self.bottom + 38, said, "middle small")
        yield text_at(self.left, self.top - 5, "TFLOP/s", "middle small")


def timeline(report: Report) -> Picture | None:
    """Draw what two threads of a block do between its barriers, and the race between them."""
    if not report.timeline:
        return None
    race = next((f for f in report.findings if _drawable(f, report)), None)
    shown, left_out = _shown(report.timeline, race)
    picture = _Timeline(report, race)
    for interval in report.timeline:
        if interval.number in shown:
            picture.interval(interval)
        elif interval.number - 1 in shown:
            picture.gap(left_out)
    sentence = _timeline_sentence(report, race)
    rows = [
        (str(i.number), str(line), op, text, f"×{times}")
        for i in report.timeline
        if i.number in shown
        for line, text, op, _, times in i.steps
    ]
    where = (
        ""
        if _blocks(report) == 1
        else f" (block {words.index(report.timeline_block, report.grid)})"
    )
    return Picture(
        title=f"From barrier to barrier{where}",
        sentence=sentence,
        svg=picture.svg(sentence),
        columns=("barriers passed", "line", "what", "where", "times"),
        rows=tuple(rows),
        shows_a_problem=race is not None,
    )


class _Timeline:
    """What threads do, time going down; a barrier is a bar across. A race has a lane a thread."""

    lane_width, step = 272, 24

    def __init__(self, report: Report, race: Finding | None) -> None:
        self.report, self.race = report, race
        self.parts: list[str] = []
        self.arrow = ""
        self.y = 34
        self.lanes: tuple[int, ...] = (84,)
        names = ["every thread of the block"]
        if race is not None and race.first is not None and race.second is not None:
            self.lanes = (84, 456)
            names = [words.who(place, report) for place in (race.first, race.second)]
        self.right = self.lanes[-1] + self.lane_width
        for x, who in zip(self.lanes, names, strict=True):
            self.parts.append(text_at(x + self.lane_width / 2, 18, who, "middle strong"))

    def interval(self, interval: Interval) -> None:
        top = self.y
        races = self.race is not None and self.race.interval == interval.number
        ends: dict[int, tuple[float, float]] = {}
        for line, text, op, _, times in interval.steps:
            for lane, x in enumerate(self.lanes):
                place = self._place(lane)
                hit = races and place is not None and (place.line, place.text) == (line, text)
                if hit and self._is(op, lane):
                    ends[lane] = (x + (self.lane_width if lane == 0 else 0), self.y + 10)
                else:
                    hit = False
                self.parts += self._step(line, text, op, times, x, hit=hit)
            self.y += self.step
        middle = (top + self.y) / 2
        passed = words.count(interval.number, "barriers")
        self.parts.append(text_at(self.lanes[0] - 12, middle - 4, "after", "end small"))
        self.parts.append(text_at(self.lanes[0] - 12, middle + 10, passed, "end small"))
        if len(ends) == 2:
            self._cross(ends[0], ends[1])
        if interval.barrier is not None:
            self._barrier(interval.barrier)

    def gap(self, left_out: int) -> None:
        said = f"⋮  {words.count(left_out, 'intervals')} more"
        middle = (self.lanes[0] + self.right) / 2
        self.parts.append(text_at(middle, self.y + 14, said, "middle small"))
        self.y += 26

    def svg(self, label: str) -> str:
        parts = [*self.parts, self.arrow]
        return drawing(self.right + 4, self.y + 8, parts, label=f"Timeline. {label}")

    def _place(self, lane: int) -> Place | None:
        race = self.race
        return None if race is None else (race.first, race.second)[lane]

    def _is(self, op: str, lane: int) -> bool:
        """Whether an operation is what the race's thread of this lane does."""
        assert self.race is not None
        writes = {"read-after-write": (True, False), "write-after-read": (False, True)}
        return (op != "load") == writes.get(self.race.kind, (True, True))[lane] or op == "atomic"

    def _step(
        self, line: int, text: str, op: str, times: int, x: float, *, hit: bool
    ) -> Iterable[str]:
        kind = {"load": "read", "store": "write"}.get(op, "update")
        style = f"step {kind}{' hit' if hit else ''}"
        yield tag(
            "rect", x=x, y=self.y, width=self.lane_width, height=self.step - 4, rx=2, class_=style
        )
        said = f"{line}  {kind}s {text}"
        if len(said) > 40:
            said = f"{said[:39]}…"
        yield text_at(x + 8, self.y + 14, said, "code strong" if hit else "code")
        if times > 1:
            at = x + self.lane_width - 8
            yield text_at(at, self.y + 14, f"×{times:,}", "code end")

    def _barrier(self, line: int) -> None:
        x, width = self.lanes[0], self.right - self.lanes[0]
        box = {"x": x, "y": self.y + 3, "width": width, "height": 18}
        self.parts.append(tag("rect", **box, class_="barrier"))
        said = f"line {line}: barrier, all threads wait here"
        self.parts.append(text_at(x + width / 2, self.y + 16, said, "middle on-barrier"))
        self.y += 30

    def _cross(self, a: tuple[float, float], b: tuple[float, float]) -> None:
        """The race: an arrow from what came first to what came second."""
        (x1, y1), (x2, y2) = a, b
        middle, y = (x1 + x2) / 2, min(y1, y2)
        self.arrow = tag(
            "g",
            [
                tag("path", d=f"M{x1} {y1}L{x2 - 9} {y2}", class_="race", marker_end="url(#arrow)"),
                text_at(middle, y - 20, "no barrier", "middle halo bad"),
                text_at(middle, y - 6, "between", "middle halo bad"),
            ],
        )


def thread_map(report: Report) -> Picture | None:
    """Draw where in the arrays one block reads and writes, and which thread writes what."""
    threads = report.thread_map
    if threads is None:
        return None
    arrays = {array.name: array for array in report.arrays if array.space == "global"}
    boxes = {name: box for name, box in threads.reads.items() if name in arrays}
    written = [element for element in threads.elements if element is not None]
    if written:
        ends = zip(*written, strict=True)
        boxes[threads.array] = tuple((min(axis), max(axis)) for axis in ends)
    parts, width, height = _arrays(arrays, boxes, threads.array)
    grid, grid_width, grid_height = _threads(threads, width + 40)
    sentence = _thread_sentence(threads, boxes)
    rows = [
        (
            str(thread_of_lane(0, i, threads.shape)),
            str(i // 32),
            str(i % 32),
            words.at(threads.array, e),
        )
        for i, e in enumerate(threads.elements)
        if e is not None
    ]
    return Picture(
        title=f"What block {words.index(threads.block, report.grid)} computes",
        sentence=sentence,
        svg=drawing(
            width + 40 + grid_width,
            max(height, grid_height),
            [*parts, *grid],
            label=f"Map of the block. {sentence}",
        ),
        columns=("thread", "warp", "lane", "writes"),
        rows=tuple(rows),
    )


def _arrays(
    arrays: dict[str, ArrayRow], boxes: dict[str, tuple[tuple[int, int], ...]], output: str
) -> tuple[list[str], float, float]:
    """The arrays to scale with the block's part of each; operands of a product around it."""
    flat = {name: _two(arrays[name].shape) for name in boxes}
    most = max((max(shape) for shape in flat.values()), default=1)
    scale = 150 / most
    size = {n: (max(6.0, w * scale), max(6.0, h * scale)) for n, (h, w) in flat.items()}
    rows, across = _product(flat, output)
    places: dict[str, tuple[float, float]] = {}
    if rows is not None and across is not None:
        # The figure of every textbook: B above C, A to its left.
        corner_x, corner_y = 20 + size[rows][0] + 14, 30 + size[across][1] + 30
        places = {rows: (20, corner_y), across: (corner_x, 30), output: (corner_x, corner_y)}
    else:
        x = 20.0
        for name in boxes:
            places[name] = (x, 30)
            x += max(size[name][0], 70) + 24
    parts = []
    for name, (x, y) in places.items():
        wide, high = size[name]
        shape = "×".join(f"{n:,}" for n in arrays[name].shape)
        parts.append(text_at(x, y - 7, f"{name}  {shape}", "small"))
        parts.append(tag("rect", x=x, y=y, width=wide, height=high, class_="array"))
        (top, bottom), (left, right) = _two_spans(boxes[name], arrays[name].shape)
        height, width = flat[name]
        box = {
            "x": x + wide * left / width,
            "y": y + high * top / height,
            "width": max(2.0, wide * (right + 1 - left) / width),
            "height": max(2.0, high * (bottom + 1 - top) / height),
        }
        parts.append(tag("rect", **box, class_="first" if name == output else "reads"))
    right_edge = max((x + max(size[n][0], 80) for n, (x, _) in places.items()), default=0)
    bottom_edge = max((y + size[n][1] for n, (_, y) in places.items()), default=0)
    return parts, right_edge, bottom_edge + 10


def _product(shapes: dict[str, tuple[int, int]], output: str) -> tuple[str | None, str | None]:
    """The operand whose rows, and the one whose columns, are those of a matrix product."""
    others = [name for name in shapes if name != output]
    if len(others) != 2 or output not in shapes:
        return None, None
    height, width = shapes[output]
    for a, b in (others, others[::-1]):
        if shapes[a][0] == height and shapes[b][1] == width and shapes[a][1] == shapes[b][0] > 1:
            return a, b
    return None, None


def _threads(threads: ThreadMap, left: float) -> tuple[list[str], float, float]:
    """The block's threads, x across: warps told apart by shade and border, corners by element."""
    across, down = threads.shape[0], threads.shape[1] * threads.shape[2]
    # A block of one row is folded, a warp a row.
    if down == 1 and across > 32:
        across, down = 32, -(-across // 32)
    cell = max(6.0, min(17.0, 272 / across))
    down_shown = min(down, 32)
    top = 30
    parts = [text_at(left, 18, "threads of the block, x across; shades tell warps apart", "small")]
    for i, element in enumerate(threads.elements):
        row, column = divmod(i, across)
        if row >= down_shown:
            break
        shade = "thread-idle" if element is None else f"thread{i // 32 % 2}"
        box = {
            "x": left + column * cell,
            "y": top + row * cell,
            "width": cell - 1,
            "height": cell - 1,
        }
        parts.append(tag("rect", **box, class_=shade))
    height = top + down_shown * cell
    written = [e for e in threads.elements if e is not None]
    if written:
        said = f"the first thread that writes: {words.at(threads.array, written[0])}"
        parts.append(text_at(left, height + 14, said, "small"))
        said = f"the last: {words.at(threads.array, written[-1])}"
        parts.append(text_at(left, height + 29, said, "small"))
    return parts, max(across * cell, 290) + 8, height + 38


def _thread_sentence(threads: ThreadMap, boxes: dict[str, tuple[tuple[int, int], ...]]) -> str:
    writers = sum(element is not None for element in threads.elements)
    said = f"{writers:,} of {len(threads.elements):,} threads write an element of {threads.array}"
    reads = [
        words.at(name, [f"{a}–{b}" if a != b else str(a) for a, b in box])
        for name, box in boxes.items()
        if name != threads.array
    ]
    if reads:
        said += f"; the block reads {' and '.join(reads)}"
    return words.sentence(said)


def _timeline_sentence(report: Report, race: Finding | None) -> str:
    if race is not None and race.first is not None and race.second is not None:
        first, second = (words.who(place, report) for place in (race.first, race.second))
        return _RACES[race.kind].format(words.sentence(second)[:-1], first)
    if not report.barriers_per_block:
        return "The block has no barrier: nothing orders what its threads do."
    passed = words.count(report.barriers_per_block, "barriers")
    return (
        f"The block passes {passed}. Between two of them its threads run in any order: what one "
        "has written, another may read only after the next barrier."
    )


def _drawable(finding: Finding, report: Report) -> bool:
    """Whether a finding is a race between two threads of one block."""
    return (
        finding.kind in _RACES
        and finding.severity == "error"
        and finding.first is not None
        and finding.second is not None
        and finding.first.block == finding.second.block
        and any(interval.number == finding.interval for interval in report.timeline)
    )


def _shown(intervals: Sequence[Interval], race: Finding | None) -> tuple[set[int], int]:
    """The numbers of the intervals to draw, and how many are left out."""
    numbers = [interval.number for interval in intervals]
    if len(numbers) <= _INTERVALS and race is None:
        return set(numbers), 0
    shown = set(numbers[: _INTERVALS - 1]) | {numbers[-1]}
    if race is not None and race.interval is not None:
        shown = {race.interval, race.interval + 1} & set(numbers)
    return shown, len(numbers) - len(shown)


def _ticks(low: float, high: float) -> Iterable[float]:
    """Powers of two or of ten within a range: as many as can be read."""
    base = 2 if high / low < 300 else 10
    first, last = math.ceil(math.log(low, base)), math.floor(math.log(high, base))
    step = max(1, (last - first) // 6)
    return [float(base) ** e for e in range(first, last + 1, step)]


def _times(text: str, ratio: float) -> str:
    return text if ratio < 1.005 else f"{text}  ({words.ratio(ratio)}×)"


def _two(shape: Sequence[int]) -> tuple[int, int]:
    *rest, last = shape
    return math.prod(rest), last


def _two_spans(
    box: Sequence[tuple[int, int]], shape: Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """A box as rows and columns; further axes are laid below one another."""
    first = last = 0
    for (low, high), length in zip(box[:-1], shape[:-1], strict=True):
        first, last = first * length + low, last * length + high
    return (first, last), box[-1]


def _blocks(report: Report) -> int:
    x, y, z = report.grid
    return x * y * z
