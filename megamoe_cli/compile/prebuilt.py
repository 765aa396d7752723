"""Cubins built elsewhere: what ``megamoe remote`` sends along, so that a cold build does not eat the far side's limit.

``MEGAMOE_PREBUILT`` names their folder. While it is set nothing is compiled for sm_90a here, unless
``MEGAMOE_REMOTE_COMPILER=1``: a compiler that runs unasked is another compiler than the one that was looked at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megamoe_cli.compile import nvrtc
from megamoe_cli.compile.cache import BuildCache, Entry, key_of
from megamoe_cli.errors import BuildFailed

if TYPE_CHECKING:
    from megamoe_cli.compile.artifact import BuiltKernel
    from megamoe_cli.compile.driver import Prepared


def key(ready: Prepared) -> str:
    """Like the cache's key, without the compiler: the manifest says which one it was."""
    return key_of(target="sm_90a", options=[*nvrtc.OPTIONS, *ready.request.options], sources=ready.sources.digest, text=ready.text)


def lookup(ready: Prepared) -> Entry | None:
    """The prebuilt cubin; None when it is for the compiler here to make. BuildFailed when that was not asked for."""
    folder = os.environ.get("MEGAMOE_PREBUILT")
    if not folder:
        return None
    found = None if ready.request.force else BuildCache(Path(folder)).get(key(ready), ".cubin")
    if found is None and os.environ.get("MEGAMOE_REMOTE_COMPILER") != "1":
        raise BuildFailed(f"phase {ready.request.phase}, {ready.config.name()}: not among the prebuilt cubins in {folder}",
                          hint="pass --remote-compiler to megamoe remote to compile it there")
    return found


def export(kernels: Iterable[tuple[Prepared, BuiltKernel]], folder: Path) -> list[str]:
    """Copies built cubins and their manifests into ``folder`` and removes what is not among them. Returns the keys."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = []
    for ready, kernel in kernels:
        name = key(ready)
        keys.append(name)
        shutil.copyfile(kernel.path, folder / f"{name}.cubin")
        shutil.copyfile(kernel.path.with_suffix(".json"), folder / f"{name}.json")
    for path in folder.iterdir():
        if path.stem not in keys:
            path.unlink()
    return keys


def describe(manifest: dict[str, Any]) -> dict[str, Any]:
    """Who built it: the part of a manifest that belongs into a record of a run elsewhere."""
    return {name: manifest.get(name) for name in ("phase", "compiler", "build_host", "built_at", "sha256", "source_digest")}
