"""Turns the emulator's return addresses into source places: ``addr2line -i`` also names the inlined callers."""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .emu_binding import EmuFinding

_TOKEN = re.compile(r" ?\[\[([0-9a-f]+)\]\]")
_AT = re.compile(r"(?P<place> at (?P<file>\S+):(?P<line>\d+))?(?P<token> ?\[\[(?P<pc>[0-9a-f]+)\]\])")
_WARP = re.compile(r"\bCTA \d+ warp (\d+)\b")
# Frames every operation passes through; they say nothing about the kernel.
_PLUMBING = ("/hw/emu/device.cuh", "/hw/emu/device_math.cuh")


def shorten(place: str) -> str:
    """``.../kernels/roles/../comm/wait.cuh:31`` -> ``kernels/comm/wait.cuh:31``."""
    place = posixpath.normpath(place) if place else ""
    at = place.rfind("/kernels/")
    return place[at + 1:] if at >= 0 else place


def _inline(match: re.Match[str], places: Mapping[int, tuple[str, ...]]) -> str:
    """`` at F:L [[pc]]`` -> `` at F:L <- caller <- ...``; the call itself is not repeated as its own caller."""
    chain = places.get(int(match["pc"], 16), ())
    here = shorten(f"{match['file']}:{match['line']}") if match["place"] else ""
    steps = ([here] if here else []) + [place for place in chain if place != here]
    return " at " + " <- ".join(steps) if steps else ""


class Symbolizer:
    """``images``: load address -> library of every kernel. Addresses outside them resolve to nothing. ``roles``: the name
    of each warp of a CTA, added where a text mentions the warp."""

    def __init__(self, images: Mapping[int, Path], roles: Sequence[str] = ()) -> None:
        self._roles = roles
        self._images = sorted(images.items())
        self._tool = shutil.which("addr2line")

    def resolve(self, findings: list[tuple[EmuFinding, int]]) -> list[EmuFinding]:
        """Fills file, line and chain of each finding and replaces the address tokens of its text."""
        wanted: set[int] = set()
        for finding, pc in findings:
            wanted.update(int(token, 16) for token in _TOKEN.findall(finding.text))
            if pc:
                wanted.add(pc)
        places = self._places(wanted)
        return [self._one(finding, places.get(pc, ()), places) for finding, pc in findings]

    def _one(self, finding: EmuFinding, chain: tuple[str, ...], places: Mapping[int, tuple[str, ...]]) -> EmuFinding:
        text = _AT.sub(lambda match: _inline(match, places), finding.text)
        text = _WARP.sub(lambda match: self._with_role(match.group()), text)
        file, line = shorten(finding.file), finding.line
        if not file and chain:
            file, _, number = chain[0].rpartition(":")
            line = int(number) if number.isdigit() else 0
        return replace(finding, text=text, file=file, line=line, chain=chain)

    def _with_role(self, mention: str) -> str:
        warp = int(mention.rsplit(" ", 1)[1])
        return f"{mention} ({self._roles[warp]})" if warp < len(self._roles) and self._roles[warp] else mention

    def _places(self, wanted: set[int]) -> dict[int, tuple[str, ...]]:
        by_image: dict[tuple[int, Path], list[int]] = {}
        for pc in sorted(wanted):
            below = [image for image in self._images if image[0] <= pc]
            if below:
                by_image.setdefault(below[-1], []).append(pc)
        places: dict[int, tuple[str, ...]] = {}
        if self._tool is None:
            return places
        for (base, path), pcs in by_image.items():
            # A return address belongs to the instruction before it.
            offsets = [hex(pc - base - 1) for pc in pcs]
            try:
                answer = subprocess.run([self._tool, "-a", "-i", "-e", str(path), *offsets], capture_output=True, text=True,
                                        timeout=60, check=False)
            except (OSError, subprocess.TimeoutExpired):
                continue
            places.update(self._parse(answer.stdout, pcs))
        return places

    @staticmethod
    def _parse(output: str, pcs: list[int]) -> dict[int, tuple[str, ...]]:
        """addr2line prints each address, then one line per inlined frame, innermost first."""
        places: dict[int, tuple[str, ...]] = {}
        chains: list[list[str]] = []
        for line in output.splitlines():
            if line.startswith("0x"):
                chains.append([])
            elif chains and not line.startswith("??") and not any(part in line for part in _PLUMBING):
                chains[-1].append(shorten(line.split(" (")[0]))
        for pc, chain in zip(pcs, chains, strict=False):
            places[pc] = tuple(chain)
        return places
