"""The three ways to run: a plain checkout, the built wheel, and a machine that lacks the optional packages."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megamoe_cli import __version__, paths

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "megamoe_cli", "phases", "tuning", "kernels")
PROBE = ("import megamoe_cli, megamoe_cli.phases, megamoe_cli.phases.l1, megamoe_cli.tuning\n"
         "from megamoe_cli import paths, testplan\n"
         "print(megamoe_cli.phases.l1.__file__)\nprint(paths.kernels_dir())\nprint(paths.checkout_root())\n"
         "print(paths.kernel_source_digest())\nprint(','.join(testplan.phase_names()))\n")


def python(*args: str, path: Path | None, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs this interpreter with ``path`` as the only added import path."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MEGAMOE_CACHE_DIR")}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return subprocess.run([sys.executable, *args], cwd=cwd, env={**env, **environ}, capture_output=True, text=True, timeout=150)


@pytest.fixture(scope="module")
def wheel_contents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, unpacked. Built from a copy: setuptools leaves folders behind in the tree it builds."""
    # By metadata: importing setuptools after pytest has loaded distutils fails.
    try:
        version = importlib.metadata.version("setuptools")
        importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    if int(version.partition(".")[0]) < 77:
        pytest.skip("setuptools is older than 77")
    base = tmp_path_factory.mktemp("wheel")
    source = base / "source"
    source.mkdir()
    for name in SHIPPED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, source / name)
    done = python("-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(base),
                  path=None, cwd=source)
    assert done.returncode == 0, done.stderr
    (wheel,) = base.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(base / "site")
    return base / "site"


def test_the_wheel_has_one_import_name(wheel_contents: Path) -> None:
    top = sorted(p.name for p in wheel_contents.iterdir())
    assert top == [f"megamoe-{__version__}.dist-info", "megamoe_cli"]
    (info,) = wheel_contents.glob("*.dist-info")
    assert "megamoe = megamoe_cli.cli.main:run" in (info / "entry_points.txt").read_text()
    assert (info / "licenses" / "LICENSE").is_file()


def test_the_wheel_has_every_module_and_every_kernel_source(wheel_contents: Path) -> None:
    package = wheel_contents / "megamoe_cli"
    for folder, inside in (("megamoe_cli", "."), ("phases", "phases"), ("tuning", "tuning"), ("kernels", "_kernels")):
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc":
                assert (package / inside / file.relative_to(ROOT / folder)).is_file(), file


def test_from_the_wheel(wheel_contents: Path, tmp_path: Path) -> None:
    done = python("-c", PROBE, path=wheel_contents, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    phase, kernels, root, digest, phases = done.stdout.split()
    package = wheel_contents / "megamoe_cli"
    assert (phase, kernels, root) == (str(package / "phases" / "l1.py"), str(package / "_kernels"), "None")
    assert digest == paths.kernel_source_digest() and phases == "stub,dispatch,l1,l2,combine"
    version = python("-m", "megamoe_cli", "--version", path=wheel_contents, cwd=tmp_path)
    assert version.stdout == f"megamoe {__version__} (kernel sources {digest})\n"
    listed = python("-m", "megamoe_cli", "test", "-n", path=wheel_contents, cwd=tmp_path)
    assert listed.returncode == 0 and len(listed.stdout.splitlines()) == 20


@pytest.mark.parametrize("inside", [True, False])
def test_from_a_plain_checkout(inside: bool, tmp_path: Path) -> None:
    """``python -m megamoe_cli`` in the checkout, and with only its path known from elsewhere."""
    done = python("-c", PROBE, path=None if inside else ROOT, cwd=ROOT if inside else tmp_path)
    assert done.returncode == 0, done.stderr
    phase, kernels, root, _, _ = done.stdout.split()
    assert (phase, kernels, root) == (str(ROOT / "phases" / "l1.py"), str(ROOT / "kernels"), str(ROOT))


def test_two_names_for_one_module_do_not_exist() -> None:
    """``from megamoe_cli import phases`` and the dotted import are the same object, and a reload adds no finder."""
    done = python("-c", "import sys, importlib, megamoe_cli\nfrom megamoe_cli import phases\nimport megamoe_cli.phases as again\n"
                  "importlib.reload(megamoe_cli)\nprint(phases is again, sum(getattr(f, '__name__', '') == '_CheckoutFinder' "
                  "for f in sys.meta_path), 'phases' in sys.modules)", path=None, cwd=ROOT)
    assert done.stdout.split() == ["True", "1", "False"], done.stderr


def test_without_the_packages_a_cuda_container_lacks(tmp_path: Path) -> None:
    """Blocks them and imports every module of ours that does not need a GPU; then plans a run."""
    blocked = "import sys\nfor name in ('msgspec', 'platformdirs', 'tomli', 'hypothesis', 'pytest'): sys.modules[name] = None\n"
    code = blocked + ("import pkgutil, importlib, megamoe_cli\n"
                      "for m in pkgutil.walk_packages(megamoe_cli.__path__, 'megamoe_cli.'):\n"
                      "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
                      "from megamoe_cli.cli.main import main\nsys.exit(main(['test', '-n', '--backend', 'emulator']))")
    done = python("-c", code, path=ROOT, cwd=tmp_path, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 20


def test_make_uses_the_interpreter_it_is_given() -> None:
    """Set-up of an interpreter that has everything does nothing; the commands use it."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    env = {**os.environ, "MEGAMOE_PYTHON": sys.executable}
    for target, words in (("run", "-m megamoe_cli test --ranks 8 --phase all"), ("test", "-m pytest"),
                          ("build", "-m megamoe_cli build")):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        assert f"{sys.executable} {words}" in done.stdout and ".ci/setup venv" not in done.stdout
    # An interpreter that already has torch and CuPy is found; one that lacks them gets a virtual environment.
    env.pop("MEGAMOE_PYTHON")
    found = subprocess.run(["make", "-n", "run", f"PYTHON={sys.executable}"], cwd=ROOT, env=env, capture_output=True,
                           text=True, timeout=60)
    assert f"{sys.executable} -m megamoe_cli test" in found.stdout
    bare = subprocess.run(["make", "-n", "run", f"PYTHON={sys.executable} -S -I"], cwd=ROOT, env=env, capture_output=True,
                          text=True, timeout=60)
    assert ".venv/bin/python -m megamoe_cli test" in bare.stdout


def test_setup_says_what_it_cannot_install(tmp_path: Path) -> None:
    """An interpreter with a missing package and a pip that fails: one line, exit 3."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\ncase \"$1\" in -m) exit 1;; -c) exit 0;; -) cat >/dev/null; echo yaml xdist;; esac\n")
    fake.chmod(0o755)
    done = subprocess.run([ROOT / ".ci" / "setup", "check", str(fake)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "pyyaml pytest-xdist" in done.stderr.splitlines()[-1]
    assert subprocess.run([ROOT / ".ci" / "setup", "bogus"], capture_output=True, timeout=60).returncode == 3
