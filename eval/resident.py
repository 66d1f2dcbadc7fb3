"""How much memory a process holds."""

from __future__ import annotations

import os
from pathlib import Path


def resident_mib(pid: int) -> float:
    """Resident memory of a process and all below it, in MiB; shared pages count each time."""
    parents, pages = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            )
            pages[int(folder.name)] = int((folder / "statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    family, newest = {pid}, {pid}
    while newest:
        newest = {child for child, parent in parents.items() if parent in newest}
        family |= newest
    return sum(pages.get(one, 0) for one in family) * os.sysconf("SC_PAGE_SIZE") / 2**20
