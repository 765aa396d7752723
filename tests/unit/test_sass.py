"""Policies are no aliases: what each claims stands in its machine code. Needs nvdisasm (package nvidia-cuda-nvdisasm)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from megamoe_cli.compile import sass
from megamoe_cli.compile.driver import BuildRequest, build_many, spilling_text
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import EnvironmentUnfit
from megamoe_cli.shapes import NAMED_SHAPES

CONFIGS = {
    "fused": "block_m=64", "narrow": "block_m=64,block_n=128", "serial_n": "block_m=64,math_threads=128,policy=serial_n,promotion=rescale",
    "wide_n": "block_m=64,math_threads=128,policy=wide_n,promotion=rescale", "mma_sync": "block_m=32,policy=mma_sync",
    "pair": "block_m=64,cluster=2",
}  # fmt: skip
needs_disassembler = pytest.mark.skipif(sass.find_disassembler() is None, reason="no nvdisasm: install nvidia-cuda-nvdisasm")


@dataclass(frozen=True)
class Code:
    instructions: list[sass.Instruction]

    @property
    def shapes(self) -> set[str]:
        return sass.tensor_shapes(self.instructions)

    def names(self, part: str) -> list[str]:
        return [i.name for i in self.instructions if part in i.name]


@pytest.fixture(scope="module")
def code() -> dict[str, Code]:
    requests = [BuildRequest("l1", KernelConfig.parse(text), shape=NAMED_SHAPES["tiny"]) for text in CONFIGS.values()]
    kernels = [outcome.result() for outcome in build_many(requests)]
    return {name: Code(sass.instructions(sass.disassemble(kernel.path))) for name, kernel in zip(CONFIGS, kernels)}


@needs_disassembler
@pytest.mark.timeout(300)
def test_each_policy_has_the_products_it_claims(code: dict[str, Code]) -> None:
    assert code["fused"].shapes == {"64x128x32"}  # two warpgroups, 128 columns each
    assert code["narrow"].shapes == {"64x64x32"}  # two warpgroups, 64 columns each
    assert code["wide_n"].shapes == {"64x256x32"}
    assert code["serial_n"].shapes == {"64x128x32"}  # 256 columns as two products ...
    assert len(sass.accumulators(code["serial_n"].instructions)) == 2  # ... each with its own accumulator
    assert len(sass.accumulators(code["wide_n"].instructions)) == len(sass.accumulators(code["fused"].instructions)) == 1
    assert not code["mma_sync"].names("QGMMA") and any(shape.startswith("HMMA") for shape in code["mma_sync"].shapes)
    assert not any(code[name].names("HMMA") for name in CONFIGS if name != "mma_sync")


@needs_disassembler
def test_weights_are_multicast_in_pairs_only(code: dict[str, Code]) -> None:
    assert code["pair"].names("MULTICAST")
    assert not any(code[name].names("MULTICAST") for name in CONFIGS if name != "pair")


@needs_disassembler
def test_instructions_know_their_role(code: dict[str, Code]) -> None:
    products = {i.role for i in code["fused"].instructions if i.name.startswith("QGMMA")}
    assert products and all(role.startswith("math") for role in products)
    roles = {i.role for i in code["fused"].instructions}
    assert {"dispatch", "tma (weights)", "tma (activations)", "math (L1 epilogue)", "math (finish)"} <= roles
    assert not any(i.spills for i in code["fused"].instructions)


TEXT = """\
	.section	.text.mega_moe
//--------------------- .text.mega_moe --------------------------
	//## File "/x/kernels/hw/sm90/memory.cuh", line 68 inlined at "/x/kernels/roles/load_weights.cuh", line 103
	//## File "/x/kernels/roles/load_weights.cuh", line 103 inlined at "/x/kernels/sm90_fp8_mega_moe.cuh", line 63
	//## File "/x/kernels/sm90_fp8_mega_moe.cuh", line 63
        /*14b50*/                   STL.64 [R1], R4                                                        (*"SpillRefill"*);
        /*14b60*/              @!P0 BRA `(.L_x_2) ;
.L_x_617:
	//## File "/x/kernels/comm/wait.cuh", line 3
        /*14c30*/                   LDL.LU.64 R4, [R1] ;
        /*14c40*/               @P1 QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24, gsb0 ;
        /*14c50*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
"""


def test_reading_a_disassembly() -> None:
    found = sass.instructions(TEXT)
    assert [i.name.split(".")[0] for i in found] == ["STL", "BRA", "LDL", "QGMMA", "HMMA"]
    assert [i.role for i in found[:3]] == ["tma (weights)", "tma (weights)", sass.UNKNOWN]
    assert [i.spills for i in found] == [True, False, True, False, False]
    assert sass.tensor_shapes(found) == {"64x128x32", "HMMA.16816"} and sass.accumulators(found) == {"R24"}


def test_without_a_disassembler_the_role_is_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sass, "find_disassembler", lambda: None)
    with pytest.raises(EnvironmentUnfit, match="nvdisasm"):
        sass.disassemble(tmp_path / "x.cubin")
    assert spilling_text(tmp_path / "x.cubin") == "role: unknown"


@needs_disassembler
@pytest.mark.timeout(120)
def test_a_spill_names_its_role() -> None:
    """The public review's compact plan: 48 registers for dispatch and TMA, which this kernel does not fit in."""
    config = KernelConfig.parse("block_m=64,regs_dispatch=48,regs_tma=48,regs_math=208")
    (outcome,) = build_many([BuildRequest("combine", config, shape=NAMED_SHAPES["flash"])])
    assert outcome.kernel is not None and outcome.kernel.resources is not None
    if outcome.kernel.resources.spills:
        assert outcome.error is not None and ("role: tma" in str(outcome.error) or "role: dispatch" in str(outcome.error))
    else:
        assert outcome.error is None


@needs_disassembler
@pytest.mark.timeout(300)
@pytest.mark.parametrize("text", ["", "split=m", "cluster=2"])
def test_the_main_loop_is_on_the_uniform_datapath(text: str) -> None:
    """Descriptors are made in uniform registers. Where the compiler cannot prove that a warp stays together it makes them in vector
    registers and moves each word over (32 of them between the products, 8 % of the kernel's time)."""
    (outcome,) = build_many([BuildRequest("combine", KernelConfig.parse(text), shape=NAMED_SHAPES["flash"])])
    names = [i.name for i in sass.instructions(sass.disassemble(outcome.result().path))]
    products = [at for at, name in enumerate(names) if name.startswith("QGMMA")]
    assert len(products) == 8, "one loop with two units of four products"
    assert sum(name.startswith("R2UR") for name in names[products[0] - 40 : products[-1]]) <= 3
