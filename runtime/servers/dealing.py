"""Which server has which part of the tables: by size and by traffic, each part on as many servers as there are copies.

A table is cut into parts: row r is in part r mod p, so that rows that are wanted more than others fall into all parts alike where
rows are numbered by frequency. Parts are dealt heaviest first, each to the server whose fuller share (of bytes, of traffic)
stays least: longest-processing-time-first over two measures. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PARTS = 8  # of a table. Kind: choice; some for each of the servers that may come
LEAST_ROWS = 64  # of a part, but where a table has fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a table: bytes that it holds, and what is asked of it, in any one unit."""

    table: int
    number: int
    rows: int
    size_bytes: float
    traffic: float


Deal = tuple[tuple[int, ...], ...]  # of each part the servers that have it, the first of which is asked


def parts_of(rows: int) -> int:
    """Into how many parts so many rows are cut."""
    return max(1, min(PARTS, rows // LEAST_ROWS))


def rows_in(rows: int, parts: int, number: int) -> int:
    """Rows of one part of a table."""
    return (rows - number + parts - 1) // parts


def deal(parts: Sequence[Part], servers: Sequence[int], copies: int) -> Deal:
    """The first deal, or one anew."""
    return _filled(parts, servers, copies, [() for _ in parts])


def without(held: Deal, gone: int) -> Deal:
    """The deal when a server has gone: the other ones of its parts are asked. Raises ValueError where a part is lost."""
    found = tuple(tuple(server for server in own if server != gone) for own in held)
    lost = [number for number, own in enumerate(found) if not own]
    if lost:
        raise ValueError(f"no copy left of {len(lost)} parts")
    return found


def completed(parts: Sequence[Part], held: Deal, servers: Sequence[int], copies: int) -> Deal:
    """The deal with as many copies as there should be again, made on the servers that have least."""
    return _filled(parts, servers, copies, held)


def joined(parts: Sequence[Part], held: Deal, servers: Sequence[int], new: int) -> Deal:
    """The deal when `new` has come to `servers`: it takes parts from the fullest until it would be fuller than they."""
    found = [list(own) for own in held]
    shares = _shares(parts, len(servers) + 1)
    loads = {server: _load(found, shares, server) for server in (*servers, new)}
    while True:
        fullest = max(servers, key=lambda s: (max(loads[s]), -s))
        movable = [n for n, own in enumerate(found) if fullest in own and new not in own]
        fits = [
            n for n in movable if max(_plus(loads[new], shares[n])) <= max(_minus(loads[fullest], shares[n]))
        ]
        if not fits:
            return tuple(tuple(own) for own in found)
        chosen = max(fits, key=lambda n: (max(shares[n]), -n))
        found[chosen][found[chosen].index(fullest)] = new
        loads[fullest] = _minus(loads[fullest], shares[chosen])
        loads[new] = _plus(loads[new], shares[chosen])


Load = tuple[float, float]


def _filled(
    parts: Sequence[Part], servers: Sequence[int], copies: int, held: Sequence[Sequence[int]]
) -> Deal:
    shares = _shares(parts, len(servers))
    found = [list(own) for own in held]
    loads = {server: _load(found, shares, server) for server in servers}
    for number in sorted(range(len(parts)), key=lambda n: (-max(shares[n]), n)):
        own = found[number]
        while len(own) < min(copies, len(servers)):
            free = [server for server in servers if server not in own]
            least = min(free, key=lambda s: (max(_plus(loads[s], shares[number])), s))
            own.append(least)
            loads[least] = _plus(loads[least], shares[number])
    return tuple(tuple(own) for own in found)


def _shares(parts: Sequence[Part], servers: int) -> list[Load]:
    """Of each part its bytes and its traffic, in the even share of one server."""
    size = sum(part.size_bytes for part in parts) / servers or 1.0
    traffic = sum(part.traffic for part in parts) / servers or 1.0
    return [(part.size_bytes / size, part.traffic / traffic) for part in parts]


def _load(held: Sequence[Sequence[int]], shares: Sequence[Load], server: int) -> Load:
    own = [shares[number] for number, servers in enumerate(held) if server in servers]
    return (sum(size for size, _ in own), sum(traffic for _, traffic in own))


def _plus(one: Load, other: Load) -> Load:
    return (one[0] + other[0], one[1] + other[1])


def _minus(one: Load, other: Load) -> Load:
    return (one[0] - other[0], one[1] - other[1])
