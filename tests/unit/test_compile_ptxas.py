"""The compiler log as data. The texts are real ptxas output (NVRTC 13.5); layout of the lines is what matters."""

import pytest

from megamoe_cli.compile.ptxas import Resources, parse_log

CLEAN = """\
ptxas info    : 20 bytes gmem
ptxas info    : Compiling entry function 'mega_moe' for 'sm_90a'
ptxas info    : Function properties for mega_moe
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 400 bytes smem
ptxas info    : Compile time = 47.268 ms
"""
SPILLS = """\
mega_moe.cu(3): warning #177-D: variable "unused" was declared but never referenced

ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'mega_moe' for 'sm_90a'
ptxas info    : Function properties for mega_moe
ptxas         .     664 bytes stack frame, 660 bytes spill stores, 668 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 664 bytes cumulative stack size
"""
IGNORED = "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.\n"
SERIAL = ("ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient "
          "register resources for the wgmma pipeline in the function 'mega_moe' in line 212\n")
INJECTED = ("ptxas info    : (C7517) wgmma.wait_group is injected in around line 201 by compiler to allow use of registers "
            "defined by GMMA in function 'mega_moe'\n")


def test_a_clean_log():
    found = parse_log(CLEAN, "mega_moe")
    assert found == Resources("mega_moe", "sm_90a", 168, 0, 0, 0, 400, 16)


def test_spills_and_stack():
    found = parse_log(SPILLS, "mega_moe")
    assert (found.registers, found.spill_stores, found.spill_loads, found.spills, found.stack, found.barriers) == (64, 660, 668, 1328, 664, 1)
    assert found.notes == ()  # a compiler warning about C++ is not one of ptxas


def test_spills_of_called_functions_count():
    log = CLEAN + ("ptxas info    : Function properties for _Z3foof\n"
                   "ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n")
    found = parse_log(log, "mega_moe")
    assert (found.registers, found.spill_stores, found.spill_loads, found.stack) == (168, 4, 12, 8)


def test_notes_by_kind():
    found = parse_log(IGNORED + SERIAL + INJECTED + "ptxas warning : (C7999) something new\n" + CLEAN, "mega_moe")
    assert [(n.kind, n.code, n.line) for n in found.notes] == [
        ("setmaxnreg", "C7508", None), ("serialized", "C7511", 212), ("injected-wait", "C7517", 201), ("warning", "C7999", None)]
    assert "insufficient register resources" in found.of_kind("serialized")[0].text


@pytest.mark.parametrize("code", [f"C75{n}" for n in range(10, 16)])
def test_serialized_by_number_also_when_the_words_change(code):
    assert parse_log(f"ptxas info    : ({code}) reworded\n" + CLEAN, "mega_moe").of_kind("serialized")


def test_setmaxnreg_by_words_also_when_the_number_changes():
    assert parse_log(IGNORED.replace("C7508", "C9999") + CLEAN, "mega_moe").of_kind("setmaxnreg")


def test_several_entries():
    other = CLEAN.replace("mega_moe", "other").replace("168", "32")
    assert parse_log(other + CLEAN, "mega_moe").registers == 168
    assert parse_log(CLEAN + other, "other").registers == 32


@pytest.mark.parametrize("log", ["", CLEAN.replace("mega_moe", "other"), "ptxas fatal   : Unresolved extern function '_Z3fooy'\n"])
def test_a_log_that_says_nothing_is_refused(log):
    with pytest.raises(ValueError, match="mega_moe"):
        parse_log(log, "mega_moe")


def test_round_trip_through_plain_data():
    found = parse_log(IGNORED + SERIAL + CLEAN, "mega_moe")
    assert Resources.from_dict(found.to_dict()) == found
