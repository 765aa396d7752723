"""The ctypes mirrors against the header itself, and the sentences a fault record turns into."""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
from pathlib import Path

import pytest

from megamoe_cli import abi, layout
from megamoe_cli.abi import FaultCode, FaultRecord, KernelParams, WaitId
from megamoe_cli.paths import kernels_dir


def _compile_and_run(tmp_path: Path, body: str) -> list[list[str]]:
    source, binary = tmp_path / "probe.cpp", tmp_path / "probe"
    source.write_text('#include <cstdio>\n#include <cstddef>\n#include "layout/params.cuh"\nusing namespace megamoe;\n'
                      "int main() {\n" + body + "\n}\n")  # fmt: skip
    subprocess.run(["g++", "-std=c++17", "-Wno-invalid-offsetof", "-I", str(kernels_dir()), "-o", str(binary), str(source)],
                   check=True, timeout=120, capture_output=True, text=True)  # fmt: skip
    out = subprocess.run([str(binary)], check=True, timeout=20, capture_output=True, text=True).stdout
    return [line.split() for line in out.splitlines()]


@pytest.mark.parametrize(("name", "mirror", "size"), [("KernelParams", KernelParams, 896), ("FaultRecord", FaultRecord, 64)])
def test_struct_matches_the_header(tmp_path: Path, name: str, mirror: type[ctypes.Structure], size: int) -> None:
    fields = [f[0] for f in mirror._fields_]
    # The header's own list of fields, so that one added there cannot go unnoticed here.
    text = (kernels_dir() / "layout" / "params.cuh").read_text()
    block = re.search(rf"struct (?:alignas\(64\) )?{name} \{{(.*?)\n\}};", text, re.S).group(1)  # type: ignore[union-attr]
    declared = []
    for line in block.splitlines():
        statement = re.match(r"\s*(?:TensorMap|u64|u32|f32)\s+([^;]+);", line)
        if statement:
            declared += [re.sub(r"\[.*\]", "", part).strip() for part in statement.group(1).split(",")]
    assert fields == declared
    body = "\n".join(f'std::printf("%zu %zu\\n", offsetof({name}, {f}), sizeof({name}::{f}));' for f in fields)
    rows = _compile_and_run(tmp_path, body + f'\nstd::printf("%zu %zu\\n", sizeof({name}), alignof({name}));')
    assert int(rows[-1][0]) == ctypes.sizeof(mirror) == size
    ours = [(getattr(mirror, f).offset, getattr(mirror, f).size) for f in fields]
    assert ours == [(int(o), int(s)) for o, s in rows[:-1]]
    if name == "KernelParams":
        assert int(rows[-1][1]) == abi.PARAMS_ALIGNMENT


def _camel(region: str) -> str:
    return "k" + "".join(part.capitalize() for part in region.split("_"))


def test_enums_and_constants_match_the_header(tmp_path: Path) -> None:
    wanted = {
        "kAbiVersion": abi.ABI_VERSION, "kMaxRanks": layout.MAX_RANKS, "kMaxTopk": layout.MAX_TOPK,
        "kTokenAlignment": layout.TOKEN_ALIGNMENT, "kArrivalGranularity": layout.ARRIVAL_GRANULARITY,
        "kNumRegions": layout.NUM_REGIONS, "kFastMath": abi.ParamFlags.FAST_MATH, "kHasClamp": abi.ParamFlags.HAS_CLAMP,
        "kNoFault": FaultCode.NONE, "kWaitTimeout": FaultCode.WAIT_TIMEOUT, "kBadExpertId": FaultCode.BAD_EXPERT_ID,
        "kAbiMismatch": FaultCode.ABI_MISMATCH, "kLocalWaitTimeout": FaultCode.LOCAL_WAIT_TIMEOUT,
        **{_camel(name): at for at, name in enumerate(layout.REGIONS)},
        **{_camel(name): at for name, at in layout.CONTROL_WORDS.items()},
        **{_camel("wait_" + wait.name.lower()): wait for wait in WaitId},
    }  # fmt: skip
    rows = _compile_and_run(tmp_path, "\n".join(f'std::printf("{n} %u\\n", unsigned({n}));' for n in wanted))
    assert {name: int(value) for name, value in rows} == {name: int(value) for name, value in wanted.items()}
    text = (kernels_dir() / "layout" / "params.cuh").read_text()
    waits = re.search(r"enum WaitId : u32 \{(.*?)\}", text, re.S).group(1)  # type: ignore[union-attr]
    assert len([w for w in waits.split(",") if w.strip()]) == len(WaitId)


def test_pack_keeps_values() -> None:
    params = KernelParams(rank=3, clamp=1.5, timeout_ns=1 << 40, params_bytes=abi.PARAMS_BYTES)
    params.peer_base[31] = 0x1122334455667788
    params.set_tensor_map("l2_acts", bytes(range(128)))
    blob = params.pack()
    assert len(blob) == abi.PARAMS_BYTES == 896
    assert blob[128:256] == bytes(range(128)) == params.tensor_map("l2_acts")
    assert struct.unpack_from("<Q", blob, KernelParams.peer_base.offset + 31 * 8) == (0x1122334455667788,)
    assert struct.unpack_from("<f", blob, KernelParams.clamp.offset) == (1.5,)
    back = KernelParams.from_buffer_copy(blob)
    assert (back.rank, back.timeout_ns) == (3, 1 << 40)


def test_tensor_map_field_is_checked() -> None:
    params = KernelParams()
    with pytest.raises(ValueError, match="128 bytes"):
        params.set_tensor_map("w13", b"short")
    with pytest.raises(ValueError, match="not a tensor map"):
        params.set_tensor_map("rank", bytes(128))


def _record(**fields: int) -> FaultRecord:
    return FaultRecord.from_bytes(bytes(FaultRecord(**fields)))


def test_timeout_sentence_names_everything() -> None:
    record = _record(code=1, wait=WaitId.COUNT_FLAG, rank=2, cta=7, warp=1, index=5, observed=3, expected=4, epoch=3,
                     waited_ns=5_000_000_000)  # fmt: skip
    assert record and record.describe() == (
        "rank 2, CTA 7, warp 1, launch 3: waited 5 s for the expert counts of rank 5: saw 3, expected 4")


@pytest.mark.parametrize("wait", [w for w in WaitId if w is not WaitId.NONE])
def test_every_wait_has_words(wait: WaitId) -> None:
    text = _record(code=1, wait=wait, index=9, waited_ns=1500).describe()
    assert "1.5 us" in text and "{" not in text and "[9]" not in text  # the fallback spelling


def test_bad_id_sentence() -> None:
    record = _record(code=FaultCode.BAD_EXPERT_ID, rank=1, index=7, observed=0xFFFFFFFE, expected=8)
    assert "token 3 slot 1 names expert -2, but experts are 0..7" in record.describe(topk=2)
    assert "token*topk+slot 7" in record.describe()


def test_no_fault_is_false_and_unknown_codes_are_told() -> None:
    assert not _record() and _record().describe() == "no fault"
    assert "unknown fault code 77" in _record(code=77).describe()
    assert "trapped" in _record(code=FaultCode.LOCAL_WAIT_TIMEOUT, wait=WaitId.STAGE_FULL, index=1).describe()
    assert "rebuild the kernel" in _record(code=FaultCode.ABI_MISMATCH).describe()


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        FaultRecord.from_bytes(bytes(63))


def test_image_layout() -> None:
    image = abi.pack_tensor_map_image(0x1000, 4, 256, 256, 64, 128)
    assert len(image) == 128
    assert struct.unpack_from("<4Q4I", image, 8) == (0x1000, 4, 256, 256, 64, 128, 1, 128)
