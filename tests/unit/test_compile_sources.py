"""Include closure and digest: content only, no paths, no times."""

import os
import shutil

import pytest

from megamoe_cli.compile.sources import closure
from megamoe_cli.errors import BuildFailed
from megamoe_cli.paths import kernels_dir

TEXT = '#include "top.cuh"\nint entry;\n'


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "one"
    files = {
        "top.cuh": '#pragma once\n#include "hw/door.cuh"\n#include "layout/a.cuh"   // the layout\n#include <cstdint>\nint top;\n',
        "hw/door.cuh": '#if defined(MEGAMOE_EMULATOR)\n#include "emu/device.cuh"\n#else\n#include "sm90/ops.cuh"\n#endif\n',
        "hw/emu/device.cuh": "int emulated;\n",
        "hw/sm90/ops.cuh": '#include "../types.cuh"\n',
        "hw/types.cuh": "int types;\n",
        "layout/a.cuh": '#include "../hw/types.cuh"\n#ifdef SOMETHING\n#include "b.cuh"\n#endif\n',
        "layout/b.cuh": '#include "hw/types.cuh"\nint b;\n',
        "unrelated.cuh": "int unrelated;\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_only_what_is_reached_in_the_build_at_hand(tree):
    gpu = closure(TEXT, tree, emulator=False)
    assert list(gpu.files) == ["hw/door.cuh", "hw/sm90/ops.cuh", "hw/types.cuh", "layout/a.cuh", "layout/b.cuh", "top.cuh"]
    emulated = closure(TEXT, tree, emulator=True)
    assert "hw/emu/device.cuh" in emulated.files and "hw/sm90/ops.cuh" not in emulated.files


def test_commented_includes_do_not_count(tree):
    (tree / "top.cuh").write_text('// #include "unrelated.cuh"\n/* \n#include "unrelated.cuh"\n*/\nint top;\n')
    assert list(closure(TEXT, tree, emulator=False).files) == ["top.cuh"]


@pytest.mark.parametrize("condition, with_emulator, without", [
    ("#ifdef MEGAMOE_EMULATOR", True, False), ("#ifndef MEGAMOE_EMULATOR", False, True),
    ("#if !defined(MEGAMOE_EMULATOR)", False, True), ("#if OTHER", True, True),
])
def test_conditions(tree, condition, with_emulator, without):
    (tree / "top.cuh").write_text(f'{condition}\n#include "unrelated.cuh"\n#endif\n')
    reached = [("unrelated.cuh" in closure(TEXT, tree, emulator=e).files) for e in (True, False)]
    assert reached == [with_emulator, without]


def test_a_missing_file_names_its_includer(tree):
    (tree / "layout" / "b.cuh").write_text('#include "gone.cuh"\n')
    with pytest.raises(BuildFailed, match=r'kernels/layout/b.cuh includes "gone.cuh"'):
        closure(TEXT, tree, emulator=False)


def test_digest_ignores_path_and_time_but_not_bytes(tree, tmp_path):
    first = closure(TEXT, tree, emulator=False).digest
    other = tmp_path / "elsewhere" / "two"
    shutil.copytree(tree, other)
    for path in other.rglob("*.cuh"):
        os.utime(path, (631152000, 631152000))  # 1990
    assert closure(TEXT, other, emulator=False).digest == first
    (other / "unrelated.cuh").write_text("int changed;\n")
    (other / "hw" / "emu" / "device.cuh").write_text("int changed;\n")
    assert closure(TEXT, other, emulator=False).digest == first
    (other / "layout" / "b.cuh").write_text('#include "hw/types.cuh"\nint B;\n')
    os.utime(other / "layout" / "b.cuh", (631152000, 631152000))
    assert closure(TEXT, other, emulator=False).digest != first


def test_flattened_spells_every_include_from_the_root_and_keeps_lines(tree):
    sources = closure(TEXT, tree, emulator=False)
    flat = sources.flattened()
    assert flat["kernels/hw/sm90/ops.cuh"] == '#include "kernels/hw/types.cuh"\n'
    assert '#include "kernels/hw/types.cuh"' in flat["kernels/layout/b.cuh"]  # found from the root, not beside
    assert sources.canonical(TEXT) == '#include "kernels/top.cuh"\nint entry;\n'
    for name, text in sources.files.items():
        assert flat[f"kernels/{name}"].count("\n") == text.count("\n")


def test_the_real_kernel_is_closed_in_both_builds():
    text = '#include "sm90_fp8_mega_moe.cuh"\n'
    gpu, emulated = (closure(text, kernels_dir(), emulator=e).files for e in (False, True))
    assert "hw/sm90/wgmma.cuh" in gpu and not any(name.startswith("hw/emu/") for name in gpu)
    assert "hw/emu/device.cuh" in emulated and not any(name.startswith("hw/sm90/") for name in emulated)
