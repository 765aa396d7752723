"""What a build hands to whoever launches it."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megamoe_cli.compile.ptxas import Resources
from megamoe_cli.config import KernelConfig


@dataclass(frozen=True)
class BuiltKernel:
    """One built variant. ``path``: the cubin, or the emulator's kernel library.

    ``config`` is resolved (stages and registers filled in). ``smem_bytes``: dynamic shared memory of the launch,
    None when the build was told no shape. ``seconds``: what this call took; the compilation itself took
    ``manifest["compile_seconds"]``, maybe on another day and host. ``resources``: None for the emulator.
    """

    phase: str
    target: str
    flavour: str
    config: KernelConfig
    path: Path
    key: str
    hit: bool
    seconds: float
    smem_bytes: int | None
    resources: Resources | None
    manifest: dict[str, Any]

    @property
    def source_digest(self) -> str:
        """64 hex digits over the kernel sources this variant reaches."""
        return self.manifest["source_digest"]

    def problems(self, strict: bool = False) -> list[str]:
        """What makes the binary unfit for use: spills and ignored register requests; ``strict`` adds serialized WGMMA."""
        if self.resources is None:
            return []
        found = []
        if self.resources.spills:
            plan = ", ".join(f"{role.name} {role.registers}" for role in self.config.roles())
            found.append(f"{self.resources.spill_stores} bytes of spill stores and {self.resources.spill_loads} of loads "
                         f"(registers: {plan}; math holds {self.config.accumulators} accumulators)")
        for kind in ("setmaxnreg", "serialized") if strict else ("setmaxnreg",):
            found += [f"{note.code} {note.text}".strip() for note in self.resources.of_kind(kind)]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json and for records of results."""
        return {
            "phase": self.phase, "target": self.target, "flavour": self.flavour, "config": self.config.to_dict(),
            "config_name": self.config.name(), "config_digest": self.config.digest(), "path": str(self.path),
            "key": self.key, "cache_hit": self.hit, "seconds": round(self.seconds, 4),
            "compile_seconds": self.manifest["compile_seconds"], "smem_bytes": self.smem_bytes,
            "resources": self.resources.to_dict() if self.resources else None,
            "roles": [{"name": r.name, "warps": list(r.warps), "threads": r.threads, "registers": r.registers}
                      for r in self.config.roles()],
            "compiler": self.manifest["compiler"], "build_host": self.manifest["build_host"],
            "built_at": self.manifest["built_at"], "source_digest": self.source_digest,
        }


def provenance(compiler: str, source_digest: str, compile_seconds: float) -> dict[str, Any]:
    """The part of a manifest that says who built what, where and when."""
    return {
        "compiler": compiler, "source_digest": source_digest, "compile_seconds": round(compile_seconds, 3),
        "build_host": {"name": platform.node(), "system": platform.platform(), "machine": platform.machine()},
        "built_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **_commit(),
    }


@lru_cache(maxsize=1)
def _commit() -> dict[str, Any]:
    """``commit`` and ``dirty`` of the checkout that is built from; empty outside one. A binary may run where no git is."""
    from megamoe_cli.report.record import source_state

    return {key: value for key, value in source_state().items() if key in ("commit", "dirty")}
