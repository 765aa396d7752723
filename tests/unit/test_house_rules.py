"""Rules of the repository that a reader cannot see broken at a glance: layering, where machine operations may stand,
file sizes, one import name. Each rule has a check that it can fail."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
LAYERS = ("hw", "layout", "comm", "mma", "scheduler", "roles")
MAX_LINES = 400
# path -> why it may be longer. Keep it short; a file that only grew does not belong here.
LONG_FILES: dict[str, str] = {}
SOURCE_SUFFIXES = {".py", ".cuh", ".cu", ".h", ".hpp", ".cpp", ".S"}
CODE_FOLDERS = ("kernels", "megamoe_cli", "phases", "tuning", "tests")

# Machine operations: they have a wrapper in kernels/hw, which has a second implementation for the CPU. Code that goes
# around the wrapper would run on one of the two only.
MACHINE = re.compile(
    r"\b(asm|__asm__|__shared__|threadIdx|blockIdx|blockDim|gridDim|__syncthreads\w*|__syncwarp|__shfl\w*|__ballot\w*|"
    r"__threadfence\w*|__nanosleep|atomic[A-Z]\w*|volatile|memcpy|__CUDA_ARCH__|__nv_\w+)\b"
)
EMULATOR = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b.*EMULATOR", re.MULTILINE)
COMPILER = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b.*(__CUDACC|__CUDA_ARCH__|__GNUC__|__clang__)", re.MULTILINE)
# What the other layers may include of hw/; which implementation that is, they do not see.
HW_INTERFACE = ("hw.cuh", "types.cuh")
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SOURCE_SUFFIXES and "__pycache__" not in path.parts:
                yield path


def kernel_files() -> list[Path]:
    return [path for path in sources("kernels") if path.suffix != ".py"]


def without_comments(text: str) -> str:
    """C++ text with comments and string literals blanked, line numbers kept."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def machine_operations(text: str) -> list[str]:
    code = without_comments(text)
    return [f"line {code.count(chr(10), 0, m.start()) + 1}: {m.group()}" for m in MACHINE.finditer(code)]


def layer_of(path: Path) -> str:
    """The layer a kernel file belongs to; the file that assembles the roles stands above all of them."""
    relative = path.relative_to(KERNELS)
    return relative.parts[0] if len(relative.parts) > 1 else "top"


def bad_includes(path: Path, text: str) -> list[str]:
    """Includes of a layer to the right of the file's own, of unknown layers, or of anything outside kernels/."""
    order = (*LAYERS, "top")
    own, bad = order.index(layer_of(path)), []
    # Only comments go: a blanked string would blank the file name.
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    for quote, name in INCLUDE.findall(code):
        if quote == "<":
            bad.append(f"<{name}>: no host or CUDA header outside kernels/hw")
            continue
        target = next((p for p in ((path.parent / name).resolve(), (KERNELS / name).resolve()) if p.is_file()), None)
        if target is None or KERNELS not in target.parents:
            bad.append(f"{name}: not a file of kernels/")
        elif order.index(layer_of(target)) > own:
            bad.append(f"{name}: layer {layer_of(target)} is to the right of {layer_of(path)}")
        elif layer_of(target) == "hw" != layer_of(path) and target.relative_to(KERNELS / "hw").as_posix() not in HW_INTERFACE:
            bad.append(f"{name}: include hw/hw.cuh, which picks the implementation")
    return bad


def test_there_is_something_to_judge() -> None:
    assert len(kernel_files()) > 5
    assert {layer_of(path) for path in kernel_files()} <= {*LAYERS, "top"}, "a folder in kernels/ that is no layer"


@pytest.mark.parametrize("path", [p for p in kernel_files() if layer_of(p) != "hw"], ids=lambda p: str(p.relative_to(ROOT)))
def test_machine_operations_only_in_hw(path: Path) -> None:
    assert machine_operations(path.read_text()) == []


def test_emulator_switches_only_in_hw() -> None:
    hw = KERNELS / "hw"
    bad = [str(p.relative_to(ROOT)) for p in kernel_files()
           if p != hw / "hw.cuh" and hw / "emu" not in p.parents and EMULATOR.search(p.read_text())]
    assert bad == []
    assert EMULATOR.search((hw / "hw.cuh").read_text()), "the switch itself"
    assert [str(p.relative_to(ROOT)) for p in kernel_files() if layer_of(p) != "hw" and COMPILER.search(p.read_text())] == []


@pytest.mark.parametrize("path", [p for p in kernel_files() if layer_of(p) != "hw"], ids=lambda p: str(p.relative_to(ROOT)))
def test_a_layer_includes_only_layers_to_its_left(path: Path) -> None:
    assert bad_includes(path, path.read_text()) == []


def test_the_rules_can_fail(tmp_path: Path) -> None:
    assert machine_operations("int a;\nasm volatile(\"bar\");") == ["line 2: asm", "line 2: volatile"]
    assert machine_operations("x = atomicAdd(&y, 1); // threadIdx\n/* memcpy */") == ["line 1: atomicAdd"]
    assert machine_operations('const char* s = "asm"; hw::atomic_add(p);') == []
    assert EMULATOR.search("#ifdef MEGAMOE_EMULATOR") and not EMULATOR.search("// #ifdef nothing\n#pragma once")
    layout = KERNELS / "layout" / "params.cuh"
    assert bad_includes(layout, '#include "../hw/types.cuh"\n') == []
    assert bad_includes(layout, '// #include "../comm/x.cuh"\n') == []
    assert bad_includes(layout, '#include "../hw/sm90/tma.cuh"\n') != []
    some_role = next(p for p in kernel_files() if layer_of(p) != "hw" and layer_of(p) != "layout")
    assert bad_includes(layout, f'#include "../{some_role.relative_to(KERNELS)}"\n') != []
    assert bad_includes(layout, '#include "missing.cuh"\n#include <cuda.h>\n') != []


def test_files_stay_short() -> None:
    long = {}
    for path in sources(*CODE_FOLDERS):
        name = str(path.relative_to(ROOT))
        lines = path.read_bytes().count(b"\n")
        if lines > MAX_LINES and name not in LONG_FILES:
            long[name] = lines
    assert long == {}, f"over {MAX_LINES} lines: split them by topic"
    assert [name for name in LONG_FILES if not (ROOT / name).is_file()] == [], "exceptions for files that are gone"


def test_no_file_is_utils() -> None:
    bad = [str(p.relative_to(ROOT)) for p in sources(*CODE_FOLDERS) if re.fullmatch(r"_?(utils?|helpers?|misc|common)", p.stem)]
    assert bad == [], "name a file after what it holds"


def imported_names(text: str) -> set[str]:
    """Top-level names of absolute imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_one_import_name() -> None:
    """``import phases`` works in a checkout by accident of the current directory, and nowhere else."""
    assert imported_names("import a.b\nfrom phases import l1\nfrom . import kernels") == {"a", "phases"}
    bad = {str(p.relative_to(ROOT)): sorted(names) for p in sources("megamoe_cli", "phases", "tuning", "tests")
           if p.suffix == ".py" and (names := imported_names(p.read_text()) & {"phases", "kernels", "tuning", "results"})}
    assert bad == {}, "import them as megamoe_cli.phases and megamoe_cli.tuning"


def test_required_imports_are_dependencies() -> None:
    """What the package imports is the standard library, itself, or something pyproject.toml asks for."""
    import sys

    project = load_pyproject()["project"]
    wanted = " ".join([*project["dependencies"], *(item for name in ("gpu", "tune") for item in project["optional-dependencies"][name])])
    # import name -> distribution, where they differ
    provided = {"yaml": "pyyaml", "cupy": "cupy-cuda13x", "cuda": "cuda-bindings", "pynvml": "nvidia-ml-py", "nvidia": "nvidia-cuda-nvrtc"}
    standard_from_311 = {"tomllib"}
    unknown = {}
    for path in sources("megamoe_cli", "phases", "tuning"):
        if path.suffix == ".py":
            names = imported_names(path.read_text()) - set(sys.stdlib_module_names) - standard_from_311 - {"megamoe_cli"}
            missing = sorted(n for n in names if provided.get(n, n) not in wanted)
            if missing:
                unknown[str(path.relative_to(ROOT))] = missing
    assert unknown == {}


def load_pyproject() -> dict:
    tomllib = pytest.importorskip("tomllib" if __import__("sys").version_info >= (3, 11) else "tomli")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_in_the_wheel() -> None:
    """A package that pyproject.toml does not list is missing from the wheel and nobody notices in a checkout."""
    setuptools = load_pyproject()["tool"]["setuptools"]
    listed = set(setuptools["packages"])
    on_disk = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "megamoe_cli").rglob("__init__.py")}
    mapped = {"megamoe_cli.phases": "phases", "megamoe_cli.tuning": "tuning", "megamoe_cli._kernels": "kernels"}
    assert listed == on_disk | set(mapped)
    assert {k: v for k, v in setuptools["package-dir"].items() if k != "megamoe_cli"} == mapped
    assert {name.partition(".")[0] for name in listed} == {"megamoe_cli"}, "the wheel has one import name"
    orphans = [str(p.relative_to(ROOT)) for p in (ROOT / "megamoe_cli").rglob("*.py") if not (p.parent / "__init__.py").is_file()]
    assert orphans == []


def test_kernel_sources_are_in_the_wheel() -> None:
    patterns = load_pyproject()["tool"]["setuptools"]["package-data"]["megamoe_cli._kernels"]
    suffixes = {"." + pattern.rpartition(".")[2] for pattern in patterns}
    left_out = [str(p.relative_to(ROOT)) for p in KERNELS.rglob("*") if p.is_file() and p.suffix not in suffixes]
    assert left_out == []


@pytest.mark.parametrize("environ,seen", [
    ({}, None),
    ({"PYTEST_XDIST_WORKER": "gw1"}, None),
    ({"MEGAMOE_TEST_GPU_EACH": "1"}, None),
    ({"MEGAMOE_TEST_GPU_EACH": "1", "PYTEST_XDIST_WORKER": "gw1"}, "1"),
    ({"MEGAMOE_TEST_GPU_EACH": "1", "PYTEST_XDIST_WORKER": "gw1", "CUDA_VISIBLE_DEVICES": "4,6"}, "6"),
    ({"MEGAMOE_TEST_GPU_EACH": "1", "PYTEST_XDIST_WORKER": "gw3", "CUDA_VISIBLE_DEVICES": "4,6"}, "6"),
])  # fmt: skip
def test_each_process_of_the_gpu_set_has_a_gpu_of_its_own(environ: dict[str, str], seen: str | None) -> None:
    from tests.conftest import own_gpu

    assert own_gpu(environ) == seen
