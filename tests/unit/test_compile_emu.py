"""Host-compiler builds, with a small unit of our own: flavours, paths, readable failures."""

import ctypes

import pytest

from megamoe_cli.compile import emu_build
from megamoe_cli.compile.sources import SourceSet, digest_of
from megamoe_cli.errors import BuildFailed, EnvironmentUnfit, ExitCode

HEADER = ("inline int twice(const int* p) { return 2 * *p; }\n"
          'inline const char* where() { return __builtin_FILE(); }\n#define WHERE __FILE__\n')
UNIT = '#include "deep/toy.cuh"\nextern "C" int answer(int* p) { *p += 1; return twice(p); }\nextern "C" const char* file() { return where(); }\n'


@pytest.fixture(scope="module")
def compiler():
    return emu_build.find_host_compiler()


HOOKS = "".join(f'extern "C" void __tsan_{name}(void*) {{}}\n' for name in ("read4", "write4")) + 'extern "C" void __tsan_init() {}\n'


@pytest.fixture(scope="module")
def runtime(compiler, tmp_path_factory):
    """A library with the sanitizer's hooks and nothing else, under a name that is not its soname."""
    files = {"hw/emu/hooks.cpp": HOOKS}
    path = tmp_path_factory.mktemp("runtime") / "0123.so"
    path.write_bytes(emu_build.compile_runtime(compiler, ["hw/emu/hooks.cpp"], SourceSet(files, digest_of(files)))[0])
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return path


def sources(header=HEADER):
    files = {"deep/toy.cuh": header}
    return SourceSet(files, digest_of(files))


def test_plain_runs_and_names_files_from_the_repository(compiler, runtime, tmp_path):
    data, messages = emu_build.compile_kernel(compiler, UNIT, sources(), "plain", runtime)
    path = tmp_path / "kernel.so"
    path.write_bytes(data)
    library = ctypes.CDLL(str(path))
    library.file.restype = ctypes.c_char_p
    assert library.answer(ctypes.byref(ctypes.c_int(20))) == 42
    assert library.file() == b"kernels/deep/toy.cuh"
    assert b"megamoe-build-" not in data, "the build folder's name must not get into the product"
    assert b"__tsan" not in data and messages == ""


def test_checked_calls_the_hooks_and_not_libtsan(compiler, runtime, tmp_path):
    data, _ = emu_build.compile_kernel(compiler, UNIT, sources(), "checked", runtime)
    assert b"__tsan_read4" in data and b"__tsan_write4" in data
    assert b"libtsan" not in data and b"__tsan_func_entry" not in data
    (tmp_path / "kernel.so").write_bytes(data)  # needs the runtime by its soname, which the loaded one has
    assert ctypes.CDLL(str(tmp_path / "kernel.so")).answer(ctypes.byref(ctypes.c_int(20))) == 42


def test_a_name_the_runtime_lacks_fails_the_build(compiler, runtime):
    with pytest.raises(BuildFailed, match="undefined reference to `not_there'"):
        emu_build.compile_kernel(compiler, 'extern "C" int not_there(); extern "C" int answer() { return not_there(); }', sources(), "plain", runtime)


def test_the_same_input_gives_the_same_bytes(compiler, runtime):
    first, second = (emu_build.compile_kernel(compiler, UNIT, sources(), "plain", runtime)[0] for _ in range(2))
    assert first == second


def test_an_error_names_file_and_line(compiler, runtime):
    with pytest.raises(BuildFailed) as caught:
        emu_build.compile_kernel(compiler, UNIT, sources("int broken() {\n return q; }\n"), "plain", runtime)
    assert "kernels/deep/toy.cuh:2" in str(caught.value) and "'q'" in str(caught.value).replace("‘", "'").replace("’", "'")
    assert caught.value.exit_code == ExitCode.BUILD_FAILED


def test_runtime_units_are_linked_together(compiler, tmp_path):
    files = {"hw/emu/a.cpp": '#include "b.h"\nextern "C" int a() { return b() + 1; }\n', "hw/emu/b.h": "int b();\n",
             "hw/emu/b.cpp": '#include "b.h"\nint b() { return 6; }\n'}
    data, _ = emu_build.compile_runtime(compiler, ["hw/emu/a.cpp", "hw/emu/b.cpp"], SourceSet(files, digest_of(files)))
    (tmp_path / "r.so").write_bytes(data)
    assert ctypes.CDLL(str(tmp_path / "r.so")).a() == 7


@pytest.fixture
def fresh_lookup():
    emu_build.find_host_compiler.cache_clear()
    yield
    emu_build.find_host_compiler.cache_clear()


def test_without_a_compiler_the_package_is_named(fresh_lookup, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentUnfit) as caught:
        emu_build.find_host_compiler()
    assert "g++" in str(caught.value) and "apt-get install g++" in caught.value.hint and caught.value.exit_code == ExitCode.ENVIRONMENT


def test_cxx_is_believed_or_refused_never_replaced(fresh_lookup, monkeypatch, tmp_path):
    fake = tmp_path / "my-c++"
    fake.write_text("#!/bin/sh\necho \"my c++ $1\"\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", f"{fake} --wrapped")
    found = emu_build.find_host_compiler()
    assert found.command == (str(fake), "--wrapped") and found.version.startswith("my c++ --wrapped")
    emu_build.find_host_compiler.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(EnvironmentUnfit, match="no-such-compiler"):
        emu_build.find_host_compiler()
