"""The catalogue is sound and still fits the kernel; a few faults of each category are seen. ``make mutants`` is the whole."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megamoe_cli.compile.entry import entry_text
from megamoe_cli.config import resolve
from megamoe_cli.paths import kernels_dir
from tests.mutants import campaign
from tests.mutants.cases import REQUESTS, SEEDS, campaign_case
from tests.mutants.catalogue import MUTANTS
from tests.mutants.patching import CATEGORIES, DoesNotApply, Mutant, locate, patch, switched

# Two of each category, of different detectors, all seen by the first case that is tried. CI has minutes.
SAMPLE = (101, 113, 202, 207, 306, 305, 403, 407, 503, 508, 601, 604, 702, 707, 804, 808, 901, 905)
ROOT = Path(__file__).resolve().parents[2]


def test_the_catalogue_is_large_enough_and_well_formed() -> None:
    counts = Counter(mutant.category for mutant in MUTANTS)
    assert len(MUTANTS) >= 40 and set(counts) == set(CATEGORIES) and min(counts.values()) >= 4
    assert [m.id for m in MUTANTS] == sorted({m.id for m in MUTANTS}), "ids ascend and are not reused"
    assert all(CATEGORIES.index(m.category) + 1 == m.id // 100 for m in MUTANTS)
    assert all(m.before != m.after and m.what and set(m.cases) <= set(REQUESTS) for m in MUTANTS)
    assert len({(m.file, m.near, m.before, m.after) for m in MUTANTS}) == len(MUTANTS)
    assert {m.category for m in MUTANTS if m.id in SAMPLE} == set(CATEGORIES)


@pytest.mark.parametrize("file", sorted({m.file for m in MUTANTS}))
def test_every_fault_still_fits_the_kernel(file: str) -> None:
    """A line that was rewritten takes its fault with it: bring the catalogue up to date, with the same id and intent."""
    text = (kernels_dir() / file).read_text()
    patched = patch(text, [m for m in MUTANTS if m.file == file])
    assert patched.count("\n") == text.count("\n"), "reports must name the lines of the unpatched file"
    assert sorted(map(int, re.findall(r"hw::mutant\((\d+)\)", patched))) == [m.id for m in MUTANTS if m.file == file]


def test_the_kernel_itself_carries_no_hooks() -> None:
    found = [p for p in kernels_dir().rglob("*.cuh") if "mutant(" in p.read_text() and "hw" not in p.relative_to(kernels_dir()).parts[:1]]
    assert found == []


def test_the_hook_is_a_constant_on_the_gpu() -> None:
    from megamoe_cli.compile import nvrtc
    from megamoe_cli.compile.sources import closure

    text = ('#include "hw/hw.cuh"\nstatic_assert(!megamoe::hw::mutant(101) && !megamoe::hw::mutant(0));\n'
            'extern "C" __global__ void k() { if (megamoe::hw::mutant(101)) megamoe::hw::trap(); }\n')  # fmt: skip
    sources = closure(text, kernels_dir(), emulator=False)
    cubin, _ = nvrtc.compile_cubin(sources.canonical(text), sources.flattened(), name="k.cu")
    assert cubin


EXAMPLE = "void f() {\n    g(1);\n    if (a < b) h(a,\n      b);\n}\nvoid k() { g(1); }\n"


def test_patching() -> None:
    def fault(before: str, after: str, near: str = "", number: int = 1) -> Mutant:
        return Mutant(number, "rings", "x.cuh", before, after, "x", near)

    with pytest.raises(DoesNotApply, match="2 times"):
        locate(fault("g(1);", ""), EXAMPLE)
    with pytest.raises(DoesNotApply, match="has no"):
        locate(fault("g(2);", ""), EXAMPLE)
    with pytest.raises(DoesNotApply, match="overlaps"):
        patch(EXAMPLE, [fault("a < b", "a"), fault("if (a < b)", "x", number=2)])
    assert switched([fault("g(1);", "")], "g(1);") == "if (hw::mutant(1)) {  } else { g(1); }"
    both = patch(EXAMPLE, [fault("a < b", "a"), fault("a < b", "b", number=2), fault("h(a,\n      b);", "h(b, a);", number=3)])
    assert "if ((hw::mutant(2) ? (b) : ((hw::mutant(1) ? (a) : (a < b))))) if (hw::mutant(3)) { h(b, a); } else { h(a,\n      b); }" in both
    assert patch(EXAMPLE, [fault("g(1);", "", near="void k()")]).count("hw::mutant") == 1


def test_cases_are_legal_and_of_few_configurations() -> None:
    cases = [campaign_case(name, seed) for name in REQUESTS for seed in SEEDS]
    assert len({case.id for case in cases}) == len(cases) and all(case.options["races"] for case in cases)
    texts = {entry_text(case.phase, resolve(case.config, case.problem.shape, case.ranks)) for case in cases}
    assert len(texts) <= 8, "each is a compile"


def test_the_memory_model_page_names_faults_that_exist() -> None:
    page = (ROOT / "docs" / "memory-model.md").read_text()
    named = {int(number) for number in re.findall(r"\bM(\d{3})\b", page)}
    assert len(named) >= 25 and named <= {m.id for m in MUTANTS}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sample_of_the_faults_is_seen() -> None:
    lines: list[str] = []
    chosen = [m for m in MUTANTS if m.id in SAMPLE]
    verdicts, twins_passed = campaign.run_campaign(chosen, jobs=2, say=lines.append, rounds=1)
    assert twins_passed and all(v.killed for v in verdicts), "\n".join(lines)
    assert len({v.detector for v in verdicts}) >= 3, "not one detector for everything: " + ", ".join(v.detector for v in verdicts)


def test_a_fault_that_changes_nothing_survives_and_says_whether_it_was_reached() -> None:
    """The campaign can fail: its verdict is not a formality."""
    verdict = campaign.Verdict(replace(MUTANTS[0], what="nothing"))
    result = campaign.CaseResult("x", "pass", metrics={"notes": "mutant 101 reached 7 times"})
    campaign.judge(verdict, result, ("base", 0))
    assert not verdict.killed and verdict.reached == 7 and "SURVIVED (reached 7 times)" in verdict.line()
    campaign.judge(verdict, campaign.CaseResult("x", "fail", findings=[{"metric": "emulator_race"}]), ("base", 1))
    assert verdict.killed and verdict.detector == "race" and verdict.case == "base-s1"
    assert "1 of 1" in campaign.summary([verdict], 3) and "race 1" in campaign.summary([verdict], 3)
