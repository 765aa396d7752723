"""Compiling what a run may launch: every distinct kernel once, side by side, refusals remembered."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import BuildFailed, EnvironmentUnfit, UsageError
from megamoe_cli.tuning.journal import Journal, Trial
from megamoe_cli.tuning.plan import Plan
from megamoe_cli.tuning.schema import Choice
from megamoe_cli.tuning.space import kernel_key, kernels_of


@dataclass
class Built:
    """Compiled kernels. ``resources``: kernel (see ``kernel_key``) -> registers and spill_bytes. ``refused``: kernel -> why."""

    resources: dict[KernelConfig, dict[str, int]] = field(default_factory=dict)
    refused: dict[KernelConfig, str] = field(default_factory=dict)
    compiler: str = ""
    source: dict[str, Any] = field(default_factory=dict)  # commit and dirty, as the build manifests have them
    seconds: float = 0.0
    kernels: list[Any] = field(default_factory=list)  # Outcome of each that was built
    sent: int = 0  # kernels that came out of a folder of cubins (use_cubins)

    def of(self, choice: Choice) -> dict[str, int] | None:
        return self.resources.get(kernel_key(choice.config))

    def registers(self, choice: Choice) -> int:
        """What breaks ties: registers of the launch times threads, by the compiler where it is known."""
        found = self.of(choice)
        own = sum(role.threads * role.registers for role in choice.config.roles())
        return found["registers"] * choice.config.threads + own if found else own


def compile_all(plan: Plan, jobs: int | None, on_done: Callable[[Any, int, int], None], journal: Journal | None = None) -> Built:
    """Every distinct kernel of the plan. One that the compiler refuses, or that spills, is recorded and never a candidate;
    one that is recorded so is not compiled again."""
    from megamoe_cli.compile.driver import BuildRequest, build_many

    built, began = Built(), time.monotonic()
    configs = kernels_of([*plan.candidates, *(choice for _, choice in plan.incumbents)])
    known = {KernelConfig.from_dict(t.a): t.message for t in journal.trials.values() if t.stage == "build"} if journal else {}
    todo = [c for c in configs if kernel_key(c) not in known]
    built.refused |= {kernel_key(c): known[kernel_key(c)] for c in configs if kernel_key(c) in known}
    done = 0

    def one(outcome: Any) -> None:
        nonlocal done
        done += 1
        key = kernel_key(outcome.request.config)
        if outcome.kernel is not None and outcome.kernel.resources is not None:
            found = outcome.kernel.resources
            built.resources[key] = {"registers": found.registers, "spill_bytes": found.spills}
            facts = outcome.kernel.manifest
            if "commit" in facts:
                dirty = bool(facts.get("dirty")) or bool(built.source.get("dirty"))
                built.source = {"commit": facts["commit"], "dirty": dirty}
            built.compiler = built.compiler or str(outcome.kernel.manifest.get("compiler", ""))
            built.kernels.append(outcome)
            built.sent += os.environ.get("MEGAMOE_PREBUILT") == str(getattr(outcome.kernel, "path", Path()).parent)
        if outcome.error is not None:
            built.refused[key] = str(outcome.error)
        on_done(outcome, done, len(todo))

    requests = [BuildRequest("combine", config, "sm_90a", plan.shape, plan.ranks) for config in todo]
    outcomes = build_many(requests, jobs, one) if requests else []
    first = next((o.error for o in outcomes if isinstance(o.error, EnvironmentUnfit)), None)
    if first is not None:
        raise first
    if journal is not None:
        for key, why in built.refused.items():
            if key not in known:
                values = Choice(key).to_dict()
                journal.append(Trial(plan.key({"stage": "build", "a": values}), "build", 0, "", 0, values, values, "build-failed", message=why))
    for _, choice in plan.incumbents:
        if kernel_key(choice.config) in built.refused:
            raise BuildFailed(f"the incumbent {choice.name()} does not build: {built.refused[kernel_key(choice.config)]}")
    built.seconds = time.monotonic() - began
    return built


def send_cubins(built: Built, folder: Path) -> int:
    """Puts built cubins with their manifests into ``folder``, for ``use_cubins`` on another machine: their names there do
    not depend on the compiler. What earlier kernel sources left is removed. Returns the folder's bytes."""
    from megamoe_cli.compile import prebuilt
    from megamoe_cli.compile.driver import prepare

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for outcome in (o for o in built.kernels if o.error is None):
            name = prebuilt.key(prepare(outcome.request))
            shutil.copyfile(outcome.kernel.path, folder / f"{name}.cubin")
            shutil.copyfile(outcome.kernel.path.with_suffix(".json"), folder / f"{name}.json")
        digests = {outcome.kernel.source_digest for outcome in built.kernels}
        for manifest in folder.glob("*.json"):
            if digests and json.loads(manifest.read_text()).get("source_digest") not in digests:
                manifest.unlink()
                manifest.with_suffix(".cubin").unlink(missing_ok=True)
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}", rule="unwritable") from None


def use_cubins(folder: Path) -> None:
    """This process and its workers take kernels from ``folder``; what it lacks is compiled here."""
    if not any(folder.glob("*.cubin")):
        raise UsageError(f"{folder} holds no cubins", hint="make them with megamoe tune --build-only --cubins DIR", rule="cubins")
    os.environ["MEGAMOE_PREBUILT"] = str(folder.resolve())
    os.environ["MEGAMOE_REMOTE_COMPILER"] = "1"
