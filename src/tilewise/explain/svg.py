"""Pictures of one request as inline SVG: lane by bank, sector by sector.

Colours and patterns are named by class and set by the page's style sheet, so that a picture follows
the theme; whatever a colour says, a number, a hatching or a shape says as well. The charts of a
whole launch are in :mod:`.charts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from . import words
from .report import BankMap, Dim, LaneWord, SectorMap, SectorUse

__all__ = ["Picture", "bank_map", "drawing", "sector_map", "tag", "text_at", "thread_of_lane"]


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing with its title, a sentence that says what it shows, and the same as a table.

    ``rows`` below ``columns`` are the text alternative. ``shows_a_problem`` tells pictures worth
    opening from those that show that all is well. ``legend`` is markup.
    """

    title: str
    sentence: str
    svg: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    shows_a_problem: bool = False
    legend: str = ""


def tag(name: str, content: str | Iterable[str] = "", /, **attributes: object) -> str:
    """An element; ``class_`` stands for class, and an underscore within a name for a hyphen."""
    text = "".join(
        f' {key.strip("_").replace("_", "-")}="{_plain(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = content if isinstance(content, str) else "".join(content)
    return f"<{name}{text}>{inside}</{name}>" if inside else f"<{name}{text}/>"


def text_at(x: float, y: float, text: str, class_: str = "", **attributes: object) -> str:
    """A line of text that stands on (x, y)."""
    return tag("text", escape(text), x=x, y=y, class_=class_ or None, **attributes)


def drawing(
    width: float, height: float, parts: Iterable[str], *, label: str, interactive: bool = False
) -> str:
    """An SVG of this size; ``label`` is read out in its place, or before its rows."""
    return tag(
        "svg",
        parts,
        viewBox=f"0 0 {_plain(width)} {_plain(height)}",
        width=width,
        height=height,
        role="group" if interactive else "img",
        aria_label=label,
        class_="rows" if interactive else None,
    )


def bank_map(banks: BankMap, block: Dim) -> Picture:
    """Draw which bank each lane of a request asks, and in which wavefront it is served.

    The first lane that asks for a word has a filled cell, numbered by its wavefront; lanes that
    ask for the same word have an open one, joined to it: they are served along with it.
    """
    cell, left, top = 14, 60, 30
    width = left + banks.banks * cell + 8
    lanes = sorted({word.lane for word in banks.words} | set(banks.inactive))
    bottom = top + len(lanes) * cell
    single = len(banks.groups) == 1
    tallest = max(_asked(banks, banks.groups[0])) if single else 0
    unit = min(9.0, 72 / max(1, tallest))
    height = bottom + (tallest * unit + 34 if single else 8)

    parts = [_frame(banks, left, top, cell, bottom)]
    for group in banks.groups:
        parts += _shared_words(banks, group, left, top, cell)
    by_lane: dict[int, list[LaneWord]] = {lane: [] for lane in lanes}
    for word in banks.words:
        by_lane[word.lane].append(word)
    first = {(w.wavefront, w.bank, w.word): w.lane for w in reversed(banks.words)}
    for row, lane in enumerate(lanes):
        y = top + row * cell
        cells = [tag("rect", x=0, y=y, width=width, height=cell, class_="hit")]
        if lane % 4 == 0 or lane == lanes[-1]:
            cells.append(text_at(left - 8, y + 10.5, f"lane {lane}", "end small"))
        for word in by_lane[lane]:
            opens = first[word.wavefront, word.bank, word.word] == lane
            cells += _cell(word, opens, left + word.bank * cell, y, cell, banks.wavefronts)
        label = _lane_label(banks, lane, by_lane[lane], block)
        parts.append(tag("g", cells, class_="row", role="img", tabindex="-1", aria_label=label))
    if single:
        parts += _columns(_asked(banks, banks.groups[0]), left, bottom, cell, unit, tallest)
    return Picture(
        title=f"Banks: line {banks.line}, {banks.op} of {banks.text}",
        sentence=words.sentence(banks.sentence),
        svg=drawing(
            width, height, parts, label=f"Lanes by banks. {banks.sentence}", interactive=True
        ),
        columns=("bank", "words asked for", "by lanes", "in wavefronts"),
        rows=_bank_rows(banks),
        shows_a_problem=banks.wavefronts > banks.ideal,
        legend=_bank_legend(banks),
    )


def sector_map(sectors: SectorMap, block: Dim) -> Picture:
    """Draw the memory that a request touches, a row a line of 128 bytes, four sectors in a row.

    Bytes that a lane asks for are filled, with the lanes' numbers; bytes that are moved but that
    nobody asks for are hatched; sectors that are not moved are dotted.
    """
    pixel, left, top, height, gap = 3, 84, 26, 26, 8
    slots = _slots(sectors)
    per_line = 128 // sectors.sector_bytes
    wide = sectors.sector_bytes * pixel
    lines = sorted({sector.line for sector in sectors.sectors})
    width = left + per_line * (wide + gap)
    parts = [
        text_at(left + slot * (wide + gap), 16, f"sector {slot}", "small")
        for slot in range(per_line)
    ]
    for row, line in enumerate(lines):
        y = top + row * (height + 6)
        here = {slots[s.offset]: s for s in sectors.sectors if s.line == line}
        any_slot, any_sector = next(iter(here.items()))
        start = any_sector.offset - any_slot * sectors.sector_bytes
        cells = [tag("rect", x=0, y=y - 3, width=width, height=height + 6, class_="hit")]
        cells.append(text_at(left - 10, y + 17, f"byte {start:,}", "end small"))
        for slot in range(per_line):
            x = left + slot * (wide + gap)
            sector = here.get(slot)
            box = {"x": x, "y": y, "width": wide, "height": height}
            if sector is None:
                cells.append(tag("rect", **box, class_="absent"))
            else:
                cells += _sector(sector, sectors, box, pixel)
        label = f"Line at byte {start:,} of {sectors.array}: " + "; ".join(
            _sector_label(sector, sectors, block) for _, sector in sorted(here.items())
        )
        parts.append(tag("g", cells, class_="row", role="img", tabindex="-1", aria_label=label))
    return Picture(
        title=f"Sectors: line {sectors.line}, {sectors.op} of {sectors.text}",
        sentence=words.sentence(sectors.sentence),
        svg=drawing(
            width,
            top + len(lines) * (height + 6) + 4,
            parts,
            label=f"Sectors of one request. {sectors.sentence}",
            interactive=True,
        ),
        columns=("sector at byte", "bytes asked for", "of", "by lanes", "elements"),
        rows=tuple(
            (
                f"{s.offset:,}",
                str(_used(s)),
                str(sectors.sector_bytes),
                _spans(s.lanes),
                _ends([sectors.elements[lane] for lane in s.lanes]),
            )
            for s in sectors.sectors
        ),
        shows_a_problem=len(sectors.sectors) > sectors.ideal,
        legend=_sector_legend(),
    )


def thread_of_lane(warp: int, lane: int, block: Dim) -> str:
    """``(3, 1)``: the index of the thread that is this lane of this warp."""
    number = 32 * warp + lane
    at = (number % block[0], number // block[0] % block[1], number // (block[0] * block[1]))
    axes = max((i + 1 for i in range(3) if block[i] > 1), default=1)
    return str(at[0]) if axes == 1 else f"({', '.join(map(str, at[:axes]))})"


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return escape(str(value))


def _frame(banks: BankMap, left: int, top: int, cell: int, bottom: int) -> str:
    """The grid, the numbers of the banks, and a line between lanes that are served apart."""
    right = left + banks.banks * cell
    path = "".join(f"M{left + i * cell} {top}V{bottom}" for i in range(banks.banks + 1))
    rows = (bottom - top) // cell
    path += "".join(f"M{left} {top + i * cell}H{right}" for i in range(rows + 1))
    parts = [tag("path", d=path, class_="grid")]
    parts.append(text_at(left - 8, top - 8, "bank", "end small"))
    for bank in range(0, banks.banks, 4):
        x = left + bank * cell + cell / 2
        parts.append(text_at(x, top - 8, str(bank), "middle small"))
    for first, _ in banks.groups[1:]:
        y = top + first * cell
        parts.append(tag("path", d=f"M{left - 40} {y}H{right}", class_="border"))
    return tag("g", parts, aria_hidden="true")


def _shared_words(
    banks: BankMap, group: tuple[int, int], left: int, top: int, cell: int
) -> list[str]:
    """A line down the column from the first to the last lane that asks for the same word."""
    lanes: dict[tuple[int, int], list[int]] = {}
    for word in banks.words:
        if group[0] <= word.lane <= group[1]:
            lanes.setdefault((word.bank, word.word), []).append(word.lane)
    path = ""
    for (bank, _), same in lanes.items():
        if len(same) > 1:
            x, y = left + (bank + 0.5) * cell, top + (min(same) + 0.5) * cell
            path += f"M{x:g} {y:g}V{top + (max(same) + 0.5) * cell:g}"
    return [tag("path", d=path, class_="together", aria_hidden="true")] if path else []


def _cell(word: LaneWord, opens: bool, x: int, y: int, cell: int, wavefronts: int) -> Iterable[str]:
    """A filled cell, numbered by its wavefront; an open one where another lane has the word."""
    if not opens:
        yield tag("rect", x=x + 4, y=y + 4, width=cell - 8, height=cell - 8, class_="same")
        return
    late = word.wavefront > 0
    yield tag(
        "rect",
        x=x + 1,
        y=y + 1,
        width=cell - 2,
        height=cell - 2,
        class_="late" if late else "first",
    )
    if wavefronts > 1:
        style = "middle on-late" if late else "middle on-first"
        yield text_at(x + cell / 2, y + 10.5, str(word.wavefront + 1), style)


def _columns(
    asked: Sequence[int], left: int, bottom: int, cell: int, unit: float, tallest: int
) -> Iterable[str]:
    """Below each bank, how many words it is asked for: the longest is the cost."""
    parts = []
    for bank, number in enumerate(asked):
        if number:
            box = {"x": left + bank * cell + 3, "width": cell - 6}
            first = min(1, number)
            parts.append(tag("rect", **box, y=bottom + 6, height=first * unit, class_="first"))
            if number > 1:
                late = {"y": bottom + 6 + unit, "height": (number - 1) * unit}
                parts.append(tag("rect", **box, **late, class_="late"))
    y = bottom + 6 + tallest * unit + 16
    said = f"words asked of each bank: {tallest} at most, so {words.count(tallest, 'wavefronts')}"
    parts.append(text_at(left, y, said, "small"))
    yield tag("g", parts, aria_hidden="true")


def _asked(banks: BankMap, group: tuple[int, int]) -> list[int]:
    """How many different words each bank is asked for by the lanes of a group."""
    asked: list[set[int]] = [set() for _ in range(banks.banks)]
    for word in banks.words:
        if group[0] <= word.lane <= group[1]:
            asked[word.bank].add(word.word)
    return [len(of_bank) for of_bank in asked]


def _lane_label(banks: BankMap, lane: int, touched: Sequence[LaneWord], block: Dim) -> str:
    who = f"Lane {lane}, thread {thread_of_lane(banks.warp, lane, block)}"
    if not touched:
        return f"{who}: takes no part."
    places = ", ".join(
        f"word {w.word} in bank {w.bank}, wavefront {w.wavefront + 1}" for w in touched
    )
    return f"{who}: {touched[0].element} is {places}."


def _bank_rows(banks: BankMap) -> tuple[tuple[str, ...], ...]:
    rows = []
    for bank in range(banks.banks):
        here = [word for word in banks.words if word.bank == bank]
        if here:
            asked = sorted({w.word for w in here})
            turns = sorted({w.wavefront + 1 for w in here})
            lanes = sorted({w.lane for w in here})
            rows.append((str(bank), _spans(asked), _spans(lanes), _spans(turns)))
    return tuple(rows)


def _bank_legend(banks: BankMap) -> str:
    keys = [(_key("first"), "word served in the first wavefront")]
    if banks.wavefronts > 1:
        keys.append((_key("late"), "word that waits for a later one; its number is in the cell"))
    keys.append((_key("same"), "lane that asks for the same word: served along with it, free"))
    return _legend(keys)


def _sector_legend() -> str:
    return _legend(
        [
            (_key("first"), "bytes asked for, with the lanes"),
            (_key("waste"), "bytes moved that nobody asked for"),
            (_key("absent"), "sector of the line that is not moved"),
        ]
    )


def _key(class_: str) -> str:
    shape = tag("rect", x=1, y=1, width=12, height=12, class_=class_)
    return tag("svg", shape, width=14, height=14, aria_hidden="true")


def _legend(keys: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<span>{key} {escape(text)}</span>" for key, text in keys)


def _slots(sectors: SectorMap) -> dict[int, int]:
    """Which of its line's sectors each is: offsets are from the array's base, lines absolute."""
    size = sectors.sector_bytes
    first = sectors.sectors[0]
    for slot in range(128 // size):
        base = first.line * 128 + slot * size - first.offset
        at = {s.offset: base + s.offset for s in sectors.sectors}
        if all(at[s.offset] // 128 == s.line for s in sectors.sectors):
            return {offset: address % 128 // size for offset, address in at.items()}
    raise AssertionError("the sectors of a request do not lie in the lines they are said to")


def _sector(
    sector: SectorUse, sectors: SectorMap, box: dict[str, int], pixel: int
) -> Iterable[str]:
    x, y, height = box["x"], box["y"], box["height"]
    yield tag("rect", **box, class_="waste")
    for first, end in sector.used:
        wide = (end - first) * pixel
        yield tag("rect", x=x + first * pixel, y=y, width=wide, height=height, class_="first")
    yield tag("rect", **box, class_="outline")
    first, end = max(sector.used, key=lambda span: span[1] - span[0])
    said = _spans(sector.lanes)
    whole = (end - first) * pixel
    if len(sector.used) == 1 and 7 * len(said) + 4 <= whole:
        middle = x + first * pixel + whole / 2
        yield text_at(middle, y + 17, said, "middle on-first")
    elif len(sector.used) == 1:
        # Beside the bytes, on the side where the sector has room.
        after = sectors.sector_bytes - end >= first
        at = x + end * pixel + 4 if after else x + first * pixel - 4
        said = f"lane{'s' * (len(sector.lanes) > 1)} {said}"
        yield text_at(at, y + 17, said, "halo" if after else "halo end")


def _sector_label(sector: SectorUse, sectors: SectorMap, block: Dim) -> str:
    asked = f"{_used(sector)} of {sectors.sector_bytes} bytes asked for"
    elements = _ends([sectors.elements[lane] for lane in sector.lanes])
    many = "lanes" if len(sector.lanes) > 1 else "lane"
    first = thread_of_lane(sectors.warp, sector.lanes[0], block)
    return f"{asked} by {many} {_spans(sector.lanes)} (from thread {first}): {elements}"


def _used(sector: SectorUse) -> int:
    return sum(end - first for first, end in sector.used)


def _ends(names: Sequence[str]) -> str:
    return names[0] if names[0] == names[-1] else f"{names[0]} … {names[-1]}"


def _spans(numbers: Sequence[int]) -> str:
    """``0–7, 12``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) > 6:
        return f"{len(set(numbers))} from {runs[0][0]} to {runs[-1][1]}"
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)
