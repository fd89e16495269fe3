"""The dynamic linker's list of what it loaded, in the order in which it looks symbols up."""
from __future__ import annotations

from .address_space import Absent
from .elf import DT_DEBUG, Module
from .target import Target


def order(target: Target) -> list[Module]:
    """The modules of the program's own namespace in look-up order. Empty for a static program or when it is absent."""
    main = target.executable()
    if main is None:
        return []
    debug = main.dynamic(target.space).get(DT_DEBUG, 0)
    found: list[Module] = []
    try:
        at = target.space.word(debug + 8) if debug else 0
        while at and len(found) < 10_000:
            bias, dynamic = target.space.word(at), target.space.word(at + 16)
            module = next((m for m in target.modules if m.bias == bias and m.start <= dynamic < m.end), None)
            if module in found:
                break
            if module is not None:
                found.append(module)
            at = target.space.word(at + 24)
    except Absent:
        pass
    return found


def definer(target: Target, name: str) -> Module | None:
    """The module whose definition of a function the program uses: the first in look-up order that has it."""
    for module in order(target) or [m for m in [target.executable()] if m]:
        table = target.symbols_of(module)
        if table is not None and table.address(name) is not None:
            return module
    return None
