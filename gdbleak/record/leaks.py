"""What a recording found, as a report: the flame graph of what was not released, and a table of the stacks."""
from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..flame import Profile
from ..reports.document import Data, Report, Table, printable, share

_SHOWN_FRAMES = 4
_CONFIDENCE = 1.96      # standard deviations to each side: 95 %


@dataclass
class Site:
    """One stack: what it allocated and was not released. `variance`: of `bytes`, 0 when every call was recorded."""

    frames: tuple
    bytes: float = 0.0
    blocks: float = 0.0
    variance: float = 0.0
    samples: int = 0

    @property
    def interval(self) -> float:
        """Half the width of the 95 % interval of `bytes`."""
        return _CONFIDENCE * math.sqrt(self.variance)


@dataclass
class Recording:
    """A finished recording. `title`: of the flame graph; `facts`: lines on how it was made; `numbers`: for the
    totals; `partial`: what is missing, and why."""

    command: str
    pid: int
    title: str
    legend: str
    facts: list = field(default_factory=list)
    numbers: dict = field(default_factory=dict)
    partial: list = field(default_factory=list)
    sites: dict = field(default_factory=dict)       # frames -> Site
    noun: str = "blocks"
    extra: object = None        # makes one more table of at most so many lines

    def add(self, frames: tuple, size: float, blocks: float = 1.0, variance: float = 0.0) -> None:
        """Count what one stack holds."""
        site = self.sites.get(frames)
        if site is None:
            site = self.sites[frames] = Site(frames)
        site.bytes += size
        site.blocks += blocks
        site.variance += variance
        site.samples += 1

    def profile(self) -> Profile:
        """The flame graph."""
        profile = Profile(self.title, self.legend)
        for site in self.sites.values():
            profile.add(site.frames, round(site.bytes), round(site.blocks))
        return profile

    def report(self, top: int = 20) -> Report:
        """For people and programs."""
        report = Report(self.command, profile=self.profile())
        report.add(Data({"type": "source", "pid": self.pid, "coverage": 1.0, "partial": self.partial}))
        report.say(self.title)
        for line in [*self.facts, *self.partial]:
            report.say(line)
        total = sum(site.bytes for site in self.sites.values())
        blocks = sum(site.blocks for site in self.sites.values())
        deviation = _CONFIDENCE * math.sqrt(sum(site.variance for site in self.sites.values()))
        said = f"{total:,.0f} bytes" + (f" ± {deviation:,.0f} (95 % interval)" if deviation else "")
        report.say(f"not released: {said} in {blocks:,.0f} {self.noun}, from {len(self.sites):,} stacks")
        report.totals(pid=self.pid, bytes=round(total), blocks=round(blocks), interval=round(deviation),
                      stacks=len(self.sites), **self.numbers)
        if self.sites:
            report.add(self._table(top, total))
            if self.extra:
                report.say()
                report.add(self.extra(top))
        return report

    def _table(self, top, total) -> Table:
        ranked = sorted(self.sites.values(), key=lambda site: (-site.bytes, site.frames))
        estimated = any(site.variance for site in ranked)
        rows = []
        for site in ranked[:top]:
            inner = [printable(name, 80) for name in site.frames[::-1][:_SHOWN_FRAMES]]
            rows.append([" < ".join(inner), round(site.bytes), *([f"± {site.interval:,.0f}"] if estimated else []),
                         share(round(site.bytes), round(total)), round(site.blocks)])
        rest = len(ranked) - top
        return Table(["innermost frames", "bytes", *(["95 %"] if estimated else []), "share", self.noun], rows,
                     footer=f"and {rest:,} more stacks" if rest > 0 else "")
