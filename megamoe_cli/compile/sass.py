"""The machine code of a cubin as text: which tensor instructions it holds, and whose registers it spills.

NVIDIA's nvdisasm reads it: looked for on PATH, in the wheel nvidia-cuda-nvdisasm, and in the CUDA toolkit.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megamoe_cli.errors import EnvironmentUnfit

TIMEOUT_S = 120.0
UNKNOWN = "unknown"
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);?")
_FILE = re.compile(r'//## File "([^"]+)", line (\d+)')
# A file of kernels/roles names the role whose code it holds. What all threads run is the launch's own.
_ROLES = {"dispatch_send": "all threads", "dispatch_pull": "dispatch", "load_weights": "tma (weights)", "load_acts": "tma (activations)",
          "math_loop": "math (main loop)", "epilogue_l1": "math (L1 epilogue)", "epilogue_l2": "math (L2 epilogue)", "math": "math",
          "finish": "math (finish)", "combine": "math (combine)"}  # fmt: skip


@lru_cache(maxsize=1)
def find_disassembler() -> Path | None:
    """nvdisasm, or None."""
    if found := shutil.which("nvdisasm"):
        return Path(found)
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    candidates = [path for folder in folders for path in sorted(folder.glob("*/bin/nvdisasm"), reverse=True)]
    toolkit = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates += [Path(root) / "bin" / "nvdisasm" for root in toolkit if root]
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def disassemble(cubin: Path) -> str:
    """The text of a cubin's code with the source lines of each instruction, inlining included. EnvironmentUnfit without
    nvdisasm, or when it refuses the file (one of a newer CUDA than it knows)."""
    program = find_disassembler()
    if program is None:
        raise EnvironmentUnfit("no nvdisasm on PATH, in the Python environment or in /usr/local/cuda",
                               hint="install the package nvidia-cuda-nvdisasm")  # fmt: skip
    done = subprocess.run([str(program), "-gi", "-c", str(cubin)], capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise EnvironmentUnfit(f"nvdisasm cannot read {cubin.name}: {(done.stderr.strip().splitlines() or ['no message'])[0]}")
    return done.stdout


@dataclass(frozen=True)
class Instruction:
    """``name``: the mnemonic with its modifiers; ``operands`` as text; ``files``: where it comes from, innermost first."""

    name: str
    operands: str
    files: tuple[str, ...]

    @property
    def role(self) -> str:
        """Of the innermost file of kernels/roles; ``unknown`` without line information."""
        return next((_ROLES[stem] for file in self.files if (stem := Path(file).stem) in _ROLES), UNKNOWN)

    @property
    def spills(self) -> bool:
        """A store to or load from the thread's stack frame: nothing in this kernel lies there but spilled registers."""
        return self.name.split(".")[0] in ("STL", "LDL")


def instructions(text: str) -> list[Instruction]:
    """All instructions of a disassembly, in order."""
    found: list[Instruction] = []
    files: list[str] = []
    fresh = False
    for line in text.splitlines():
        if place := _FILE.search(line):
            files = [*files, place[1]] if fresh else [place[1]]
            fresh = True
        elif match := _INSTRUCTION.search(line):
            found.append(Instruction(match[1], match[2].strip(), tuple(files)))
            fresh = False
    return found


def tensor_shapes(code: list[Instruction]) -> set[str]:
    """Shapes of the tensor-core products: ``64x128x32`` of QGMMA, ``HMMA.16816`` and the like of warp-level ones."""
    shapes = set()
    for instruction in code:
        parts = instruction.name.split(".")
        if parts[0] == "QGMMA":
            shapes.add(parts[1])
        elif parts[0].endswith("MMA") and len(parts) > 1:
            shapes.add(f"{parts[0]}.{parts[1]}")
    return shapes


def accumulators(code: list[Instruction]) -> set[str]:
    """First registers of the accumulators that warpgroup products write."""
    return {i.operands.split(",")[0].strip() for i in code if i.name.startswith("QGMMA")}


def spilling_roles(cubin: Path) -> dict[str, int]:
    """Role -> spill instructions, most first. ``{"unknown": 0}`` when the code cannot be read."""
    try:
        code = instructions(disassemble(cubin))
    except (EnvironmentUnfit, subprocess.TimeoutExpired, OSError):
        return {UNKNOWN: 0}
    return dict(Counter(i.role for i in code if i.spills).most_common()) or {UNKNOWN: 0}
