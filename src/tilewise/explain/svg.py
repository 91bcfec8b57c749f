"""Pictures of one request as inline SVG: lane by bank, sector by sector.

Colours and patterns are named by class and set by the page's style sheet, so that a picture follows
the theme; whatever a colour says, a number, a hatching or a shape says as well. The charts of a
whole launch are in :mod:`.charts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from . import words
from .report import BankMap, Dim, LaneWord, SectorMap, SectorUse

__all__ = ["Picture", "bank_map", "drawing", "sector_map", "tag", "text_at", "thread_of_lane"]


# Geometry of a bank map, in pixels: a cell, and where the first one lies.
_CELL, _LEFT, _TOP = 14, 60, 30


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
    groups = _by_group(banks)
    lanes = sorted({word.lane for word in banks.words} | set(banks.inactive))
    bottom = _TOP + len(lanes) * _CELL
    width = _LEFT + banks.banks * _CELL + 8
    parts = [_frame(banks, bottom)]
    late: set[int] = set()
    for words_of_group in groups:
        parts += _shared_words(words_of_group)
        turns = {word.wavefront for word in words_of_group}
        late |= turns - {min(turns, default=0)}
    opening = {(w.wavefront, w.bank, w.word): w.lane for w in reversed(banks.words)}
    for row, lane in enumerate(lanes):
        y = _TOP + row * _CELL
        cells = [tag("rect", x=0, y=y, width=width, height=_CELL, class_="hit")]
        if lane % 4 == 0 or lane == lanes[-1]:
            cells.append(text_at(_LEFT - 8, y + 10.5, f"lane {lane}", "end small"))
        touched = [word for word in banks.words if word.lane == lane]
        for word in touched:
            if opening[word.wavefront, word.bank, word.word] == lane:
                number = str(word.wavefront + 1) if banks.wavefronts > 1 else ""
                cells += _filled(word, y, number, is_late=word.wavefront in late)
            else:
                cells.append(_open(word, y))
        label = _lane_label(banks, lane, touched, block)
        parts.append(tag("g", cells, class_="row", role="img", tabindex="-1", aria_label=label))
    height = bottom + 8.0
    if len(groups) == 1:
        columns, height = _columns(_asked(banks, groups[0]), bottom)
        parts.append(columns)
    label = f"Lanes by banks. {banks.sentence}"
    return Picture(
        title=f"Banks: line {banks.line}, {banks.op} of {banks.text}",
        sentence=words.sentence(banks.sentence),
        svg=drawing(width, height, parts, label=label, interactive=True),
        columns=("bank", "words asked for", "by lanes", "in wavefronts"),
        rows=_bank_rows(banks),
        shows_a_problem=banks.wavefronts > banks.ideal,
        legend=_bank_legend(has_late=bool(late), has_groups=len(groups) > 1),
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


def _by_group(banks: BankMap) -> list[list[LaneWord]]:
    """The words by the group of lanes that are served together."""
    return [
        [word for word in banks.words if first <= word.lane <= last] for first, last in banks.groups
    ]


def _frame(banks: BankMap, bottom: int) -> str:
    """The grid, the numbers of the banks, and a line between lanes that are served apart."""
    right = _LEFT + banks.banks * _CELL
    path = "".join(f"M{_LEFT + i * _CELL} {_TOP}V{bottom}" for i in range(banks.banks + 1))
    path += "".join(f"M{_LEFT} {y}H{right}" for y in range(_TOP, bottom + 1, _CELL))
    parts = [tag("path", d=path, class_="grid")]
    parts.append(text_at(_LEFT - 8, _TOP - 8, "bank", "end small"))
    for bank in range(0, banks.banks, 4):
        parts.append(text_at(_LEFT + (bank + 0.5) * _CELL, _TOP - 8, str(bank), "middle small"))
    for first, _ in banks.groups[1:]:
        parts.append(
            tag("path", d=f"M{_LEFT - 40} {_TOP + first * _CELL}H{right}", class_="border")
        )
    return tag("g", parts, aria_hidden="true")


def _shared_words(of_group: Sequence[LaneWord]) -> Iterator[str]:
    """A line down the column from the first to the last lane that asks for the same word."""
    lanes: dict[tuple[int, int], list[int]] = {}
    for word in of_group:
        lanes.setdefault((word.bank, word.word), []).append(word.lane)
    path = ""
    for (bank, _), same in lanes.items():
        if len(same) > 1:
            x, y = _LEFT + (bank + 0.5) * _CELL, _TOP + (min(same) + 0.5) * _CELL
            path += f"M{x:g} {y:g}V{_TOP + (max(same) + 0.5) * _CELL:g}"
    if path:
        yield tag("path", d=path, class_="together", aria_hidden="true")


def _filled(word: LaneWord, y: int, number: str, *, is_late: bool) -> Iterator[str]:
    """The cell of a word that is fetched, with the number of its wavefront."""
    x, side = _LEFT + word.bank * _CELL, _CELL - 2
    style = "late" if is_late else "first"
    yield tag("rect", x=x + 1, y=y + 1, width=side, height=side, class_=style)
    if number:
        yield text_at(x + _CELL / 2, y + 10.5, number, f"middle on-{style}")


def _open(word: LaneWord, y: int) -> str:
    """The cell of a word that another lane has asked for as well."""
    x, side = _LEFT + word.bank * _CELL, _CELL - 8
    return tag("rect", x=x + 4, y=y + 4, width=side, height=side, class_="same")


def _columns(asked: Sequence[int], bottom: int) -> tuple[str, float]:
    """Below each bank, how many words it is asked for: the longest is the cost; and their end."""
    tallest, top = max(asked), bottom + 6
    unit = min(9.0, 72 / max(1, tallest))
    parts = []
    for bank, number in enumerate(asked):
        box = {"x": _LEFT + bank * _CELL + 3, "width": _CELL - 6}
        if number:
            parts.append(tag("rect", **box, y=top, height=unit, class_="first"))
        if number > 1:
            rest = {"y": top + unit, "height": (number - 1) * unit}
            parts.append(tag("rect", **box, **rest, class_="late"))
    y = top + tallest * unit + 16
    said = f"words asked of each bank: {tallest} at most, so {words.count(tallest, 'wavefronts')}"
    parts.append(text_at(_LEFT, y, said, "small"))
    return tag("g", parts, aria_hidden="true"), y + 12


def _asked(banks: BankMap, of_group: Sequence[LaneWord]) -> list[int]:
    """How many different words each bank is asked for."""
    asked: list[set[int]] = [set() for _ in range(banks.banks)]
    for word in of_group:
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


def _bank_legend(*, has_late: bool, has_groups: bool) -> str:
    whose = "its group's first" if has_groups else "the first"
    keys = [(_key("first"), f"word served in {whose} wavefront")]
    if has_late:
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
