"""One case from its protocol object to a result, on a model of the kernel: what passes, what is found, what is said."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from megamoe_cli import abi, errors, judging, protocol
from megamoe_cli.case_plan import read_case, split_options
from megamoe_cli.oracle.compare import end_to_end_limits
from megamoe_cli.runner import Runner

_spec = importlib.util.spec_from_file_location("model_kernel", Path(__file__).with_name("model_kernel.py"))
model_kernel = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(model_kernel)
PHASES = model_kernel.PHASES


def case(phase="combine", tokens=(5, 0, 9, 3), **more):
    base = {"id": f"{phase}-x", "phase": phase, "shape": [256, 256, 8, 2], "ranks": len(tokens), "tokens": list(tokens),
            "capacity": 128, "routing": "uniform", "clamp": None, "seed": 1, "config": {}, "launches": 1, "timeout_s": 60,
            "options": {}, "repro": f"megamoe test --phase {phase}"}
    return base | more


def run(case, **how):
    stages, made = [], []

    def opener(ranks, seed=0):
        made.append(model_kernel.ModelBackend(ranks, **how))
        return made[-1]

    runner = Runner("emulator", case.get("ranks", 1), opener=opener, on_stage=lambda i, s: stages.append(s))
    result = runner.run(case)
    json.loads(protocol.encode(result.to_dict()))
    result.seen, result.backends = stages, made
    return result


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("launches", [1, 3])
def test_a_right_kernel_passes(phase, launches):
    result = run(case(phase, launches=launches))
    assert result.status == "pass", result.message + str(result.findings)
    assert result.where == "model(4)" and result.kernel["phase"] == phase and result.kernel["digest"]
    assert result.seen == ["inputs", "open", "compile", "upload", "run", "check"] == list(result.stages)
    assert result.backends[0].closed == 1 and result.repro == f"megamoe test --phase {phase}"
    if phase == "combine":
        limit = end_to_end_limits(256).row
        assert result.metrics["e2e"]["value"] < result.metrics["e2e"]["limit"] == limit
        assert 0.5 < result.metrics["full_bit_equal"]["share"] <= 1


@pytest.mark.parametrize(("more", "options"), [
    ({"routing": "masked:0.5", "clamp": 0.5}, {}),
    ({"routing": "one-hot-expert", "config": {"block_m": 64}}, {"snapshot": "all"}),
    ({"tokens": [0, 0, 0, 0]}, {}),
    ({"tokens": [128, 1, 0, 128], "capacity": 128}, {"sample_rows": 8}),
])
def test_variations_pass(more, options):
    result = run(case(launches=3, **more, options=options))
    assert result.status == "pass", result.message


@pytest.mark.parametrize("name", ["S01", "S03", "S08", "S16", "S20"])
def test_named_small_inputs(name):
    from megamoe_cli.cases import load_case

    ranks = load_case(name).data["ranks"]
    result = run({"id": f"combine-{name}", "phase": "combine", "case": name, "ranks": ranks, "seed": 0, "config": {},
                  "options": {}, "timeout_s": 100})  # fmt: skip
    assert result.status == "pass", result.message


def spoil(region, dtype, change, only=None, launch=None):
    """A damage function: applies ``change`` to a region of rank ``only`` (in launch ``launch``)."""
    def damage(p, buffer):
        epoch = int(buffer("control", torch.int32, 256)[0])
        if p.rank == (only or 0) and (launch is None or epoch == launch):
            shapes = {"l1_acts": (p.pool_rows, p.hidden), "combine": (p.topk, p.capacity, p.hidden),
                      "l2_acts_sf": (p.intermediate // 128, p.pool_rows), "metadata": (p.pool_rows, 3)}  # fmt: skip
            change(buffer(region, dtype, *shapes[region]))
    return damage


@pytest.mark.parametrize(("phase", "damage", "metric"), [
    ("dispatch", spoil("l1_acts", torch.uint8, lambda t: t[0].add_(1)), "dispatch"),
    ("l1", spoil("l2_acts_sf", torch.float32, lambda t: t[:, 0].mul_(1.5)), "l2_acts_sf"),
    ("l2", spoil("combine", torch.bfloat16, lambda t: t[:, 0].neg_()), "l2_row"),
    ("combine", spoil("combine", torch.bfloat16, lambda t: t[0, 0].mul_(3)), "e2e"),
])
def test_a_wrong_kernel_fails_with_the_place(phase, damage, metric):
    result = run(case(phase), damage=damage)
    assert result.status == "fail" and result.exit_code == 1 and result.findings_total >= 1
    assert any(f["metric"].startswith(metric) for f in result.findings), [f["metric"] for f in result.findings]
    assert result.message == result.message.splitlines()[0] and len(result.findings) <= 10
    assert result.findings[0]["rank"] is not None


def test_a_wrong_middle_launch_is_found_by_its_y():
    """Views are those of the last launch; y is each launch's own."""
    damage = spoil("combine", torch.bfloat16, lambda t: t[:, :4].mul_(2), launch=1)
    result = run(case(launches=3), damage=damage)
    assert result.status == "fail" and {f["metric"].split("_")[0] for f in result.findings} <= {"e2e", "full"}
    assert run(case(launches=1), damage=damage).status == "pass"
    everything = run(case(launches=3, options={"snapshot": "all"}), damage=damage)
    assert any(f["metric"].startswith("l2_row") for f in everything.findings)


def test_rows_past_the_tokens_keep_the_poison():
    def overrun(p, buffer):
        if p.rank == 2:
            model_kernel.at(p.y, torch.bfloat16, p.num_tokens + 1, p.hidden)[-1] = 0

    for launches in (1, 3):
        result = run(case(launches=launches), damage=overrun)
        assert result.status == "fail" and any(f["metric"] in ("combine_rest", "y_rest") and f["rank"] == 2 and f["token"] == 9
                                               for f in result.findings)  # fmt: skip


def test_a_lower_phase_must_not_write_y():
    def writes(p, buffer):
        if p.rank == 0:
            model_kernel.at(p.y, torch.bfloat16, 1, p.hidden).zero_()

    result = run(case("l2", launches=2), damage=writes)
    assert result.status == "fail" and result.findings[0]["metric"] == "y_rest"


def test_faults_are_told_with_their_record():
    record = abi.FaultRecord(code=abi.FaultCode.WAIT_TIMEOUT, wait=abi.WaitId.COUNT_FLAG, rank=2, cta=1, warp=0, index=3,
                             observed=0, expected=1, waited_ns=5_000_000_000)  # fmt: skip
    result = run(case(), faults={2: record})
    assert result.status == "fault" and result.exit_code == 1 and not result.respawn
    assert "rank 2, CTA 1, warp 0" in result.fault["text"] and result.fault["records"]["2"]["wait"] == "count_flag"


def test_emulator_reports_fail_a_case_whatever_its_output():
    report = {"kind": "race", "text": "two writers", "file": "epilogue_l1.cuh", "line": 12, "rank": 1, "seed": 7}
    result = run(case(), diagnostics=[report])
    assert result.status == "fail" and result.findings[0]["metric"] == "emulator_race"
    assert result.findings[0]["place"] == "epilogue_l1.cuh:12" and result.message == "emulator: race: epilogue_l1.cuh:12: two writers (seed 7)"


@pytest.mark.parametrize(("error", "status", "code", "respawn"), [
    (errors.TimedOut("rank 1 did not finish"), "hang", 124, True),
    (errors.BuildFailed("no"), "error", 4, False),
    (errors.EnvironmentUnfit("no", hint="do this"), "error", 3, False),
    (errors.LaunchFault("broke", {}), "fault", 1, False),
    (RuntimeError("boom"), "error", 70, False),
])
def test_what_a_backend_raises_becomes_a_result(error, status, code, respawn):
    result = run(case(), fail=error)
    assert (result.status, result.exit_code, result.respawn) == (status, code, respawn)
    assert str(error) in result.message and result.backends[0].closed == 1


@pytest.mark.parametrize(("change", "text"), [
    ({"phase": "l3"}, "unknown phase 'l3'"),
    ({"shape": [200, 256, 8, 2]}, "hidden=200"),
    ({"shape": "tiny"}, "must be [hidden, intermediate, experts, topk]"),
    ({"tokens": [1, 1, 1]}, "3 token counts for 4 ranks"),
    ({"tokens": [200, 0, 0, 0]}, "rank 0 has 200 tokens but the capacity is 128"),
    ({"routing": "randm"}, "unknown routing 'randm'"),
    ({"routing": "fixed:0,99"}, "expert id 99"),
    ({"config": {"block_m": 48}}, "block_m"),
    ({"launches": 0}, "launches=0"),
    ({"clamp": -1.0}, "clamp"),
    ({"options": {"snapshot": "lst"}}, "nearest: last"),
    ({"options": {"wait_s": -1}}, "must be positive"),
    ({"options": {"raw": 1}}, "must be true or false"),
    ({"options": {"colour": "red"}}, "does not know an option"),
    ({"case": "S99"}, "unknown case 'S99'"),
    ({"case": "S12"}, "launches nothing"),
    ({"tokens": [1, 1], "ranks": 2}, "the case has 2 ranks, this worker 4"),
])
def test_bad_cases_are_refused_before_a_launch(change, text):
    stages = []
    runner = Runner("emulator", 4, opener=lambda ranks, seed=0: model_kernel.ModelBackend(ranks), on_stage=lambda i, s: stages.append(s))
    result = runner.run(case() | change)
    assert result.status == "error" and result.exit_code == 2 and text in result.message and "\n" not in result.message
    assert "run" not in stages


def test_options_are_split():
    assert split_options({"wait_s": 2, "races": True, "raw": False}) == ({"wait_s": 2, "raw": False}, {"races": True})


def test_launches_have_different_data_and_one_set_of_weights():
    plan = read_case(case(launches=3), device="cpu", slow=True)
    a, b = plan.datas[0], plan.datas[1]
    assert not torch.equal(a.inputs[0].x.view(torch.uint8), b.inputs[0].x.view(torch.uint8))
    assert a.weights is b.weights and plan.launch_options(a).timeout_ns == 5_000_000_000


def test_saved_outputs_can_be_compared(tmp_path):
    for name, damage in (("a", None), ("b", None), ("c", spoil("combine", torch.bfloat16, lambda t: t[:, 0].mul_(1.05)))):
        result = run(case(options={"save": str(tmp_path / name)}), damage=damage)
        assert Path(result.metrics["saved"]).is_file()
    files = [tmp_path / n / "combine-x.pt" for n in "abc"]
    same, other = judging.agreement(files[0], files[1]), judging.agreement(files[0], files[2])
    assert set(same) == {"y", "rows", "l1_acts", "l1_acts_sf", "l1_topk_weights", "l2_acts", "l2_acts_sf"}
    assert set(same.values()) == {1.0} and 0.9 < other["y"] < 1 and other["l1_acts"] == 1


def test_a_case_judged_on_a_gpu_is_also_judged_on_the_cpu():
    """The CPU part of it, on a case that is small: one token on some ranks, experts fetched one at a time."""
    from megamoe_cli.inputs import make_case
    from megamoe_cli.oracle.casedata import PhaseOutput
    from megamoe_cli.oracle.reference import end_to_end
    from megamoe_cli.shapes import Problem, Shape

    data = make_case(Problem.make(Shape(256, 256, 8, 2), 4, (5, 0, 9, 3)), seed=2)
    ranks = [{"y": r.y.clone()} for r in end_to_end(data)]
    metrics: dict[str, float] = {}
    assert judging._on_cpu(data, PhaseOutput(ranks), metrics) == [] and metrics["e2e_cpu"] == 0
    ranks[2]["y"][8] *= 1.2
    found = judging._on_cpu(data, PhaseOutput(ranks), metrics)
    assert {(f.rank, f.token) for f in found} == {(2, 8)} and metrics["e2e_cpu"] > 0.1
