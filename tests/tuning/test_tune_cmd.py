"""``megamoe tune`` without measuring: the plan, the model's ranking, what is refused, what a terminal shows."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megamoe_cli.cli.app import App
from megamoe_cli.compile import driver
from megamoe_cli.errors import BuildFailed, ExitCode, UsageError
from megamoe_cli.report.tune_view import TuneView
from megamoe_cli.tuning.journal import Trial
from megamoe_cli.tuning.plan import Plan, fitted, visiting_order
from megamoe_cli.tuning.run import Request, make_plan, worker_command
from megamoe_cli.tuning.schema import Choice
from megamoe_cli.tuning.space import kernels_of
from megamoe_cli.tuning.static_model import ctas_per_sm, facts
from megamoe_cli.tuning.table_check import check_file
from tests.tuning.rig import SPACE
from tests.tuning.tables_at_hand import BIG, SHAPE, SMALL


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch) -> None:
    for place in ("megamoe_cli.backends.driver.visible_gpus", "megamoe_cli.backends.picking.visible_gpus"):
        monkeypatch.setattr(place, lambda: [])


@pytest.fixture
def space(tmp_path):
    (tmp_path / "space.yaml").write_text(SPACE)
    return f"{tmp_path / 'space.yaml'}:default"


# -- the plan --------------------------------------------------------------------------------------


def test_the_plan_says_what_would_run_and_what_is_refused(megamoe) -> None:
    answer = megamoe("tune", "--plan", "--rank-of", 8, "--seed", 7)
    assert answer.code == 0
    for words in ("candidates, 14 sizes from 1 to 8192 tokens", "incumbent from 120 tokens: m64",
                  "kernels to compile: ", "no GPU: compiling, and a model for 132 SMs"):
        assert words in answer.out, answer.out
    assert re.search(r"^refused +\d+ by [a-z-]+: such as: ", answer.out, re.MULTILINE) and "on a GPU, trials: about" in answer.out
    document = megamoe("tune", "--plan", "--rank-of", 8, "--seed", 7, "--json").json
    accounts = document["plan"]["accounts"]
    assert accounts["generated"] == accounts["candidates"] + accounts["same"] + sum(accounts["refused"].values())
    assert document["static"] is True and document["estimate"]["total_trials"] > accounts["candidates"]
    assert len(document["plan"]["candidates"]) == accounts["candidates"]


def test_a_plan_is_read_back_as_it_was(tmp_path, space) -> None:
    plan, _ = make_plan(Request(SHAPE, sizes=(1, 8, 64), space=space, seed=3, holdout=(5,)))
    plan.write(tmp_path)
    assert Plan.read(tmp_path) == plan


def test_what_a_trial_is_named_by(space) -> None:
    """Flip anything that changes what is measured: another key. Candidates that stand beside it do not."""
    plan, _ = make_plan(Request(SHAPE, sizes=(8,), space=space, seed=3))
    base = plan.key(plan.task("final", 8, "uniform", SMALL, BIG, 16))
    others = [
        plan.key(plan.task(*args)) for args in (
            ("screen", 8, "uniform", SMALL, BIG, 16), ("final", 9, "uniform", SMALL, BIG, 16), ("final", 8, "powerlaw", SMALL, BIG, 16),
            ("final", 8, "uniform", BIG, SMALL, 16), ("final", 8, "uniform", replace(SMALL, ctas=64), BIG, 16),
            ("final", 8, "uniform", replace(SMALL, config=replace(SMALL.config, lag=7)), BIG, 16), ("final", 8, "uniform", SMALL, BIG, 17))]
    others += [replace(plan, **change).key(replace(plan, **change).task("final", 8, "uniform", SMALL, BIG, 16)) for change in (
        {"digest": "sha256:x"}, {"ranks": 2}, {"capacity": 512}, {"seed": 4}, {"shape": replace(SHAPE, hidden=7168)},
        {"machine": replace(plan.machine, sms=78)}, {"machine": replace(plan.machine, name="H20")}, {"machine": replace(plan.machine, backend="nvlink")})]
    assert len({base, *others}) == 1 + len(others)
    fewer = replace(plan, candidates=plan.candidates[:1], run="another", sizes=[8, 16])
    assert fewer.key(fewer.task("final", 8, "uniform", SMALL, BIG, 16)) == base


def test_whenever_time_ends_what_was_visited_spans_all_sizes() -> None:
    sizes = [1 << n for n in range(14)]
    order = visiting_order(sizes)
    assert sorted(order) == sizes and order[:3] == [1, 8192, 64]
    for count in range(2, 14):
        seen = sorted(sizes.index(t) for t in order[:count])
        gaps = [b - a for a, b in zip(seen, seen[1:])]
        assert max(gaps) <= 2 * max(min(gaps), 1) + 1
    assert visiting_order([5]) == [5] and visiting_order([]) == []


# -- usage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("args", "words"), [
    (("--shape", "flsh"), "flash"), (("--ranks", "3"), "experts=256"), (("--ranks", "1,2"), "one number"), (("--tokens", "0"), "below 1"),
    (("--tokens", "x"), "--tokens"), (("--space", "quik"), "quick"), (("--space", "none.yaml:a"), "none.yaml"), (("--budget", "soon"), "--budget"),
    (("--min-gain", "200%"), "--min-gain"), (("--max-slowdown", "x"), "--max-slowdown"), (("--config", "blok_m=1"), "block_m"),
    (("--config", "block_m=48"), "allowed-values"), (("--routing", "unifrm"), "uniform"), (("--rank-of", "7"), "7 equal parts"),
    (("--ranks", "8", "--rank-of", "8"), "--rank-of"), (("--retry-failed",), "--resume"), (("--fit-only",), "--resume"),
    (("--tokens", "8,64", "--holdout", "65"), "8..64"), (("--tokens", "8,64", "--holdout", "8"), "one of them"),
    (("--strategy", "random"), "halving"), (("--rounds", "2"), "--rounds"),
])
def test_bad_input_is_one_line_and_exit_2(megamoe, tmp_path, args, words) -> None:
    answer = megamoe("tune", *args, "--results-dir", tmp_path / "results")
    lines = answer.err.splitlines()
    assert answer.code == 2 and answer.out == "" and lines[0].startswith("error: ") and words in lines[0], answer.err
    assert not (tmp_path / "results").exists(), "nothing was started"


def test_reserved_sms_bound_the_candidates_and_name_the_trials(megamoe, space) -> None:
    args = ("tune", "--plan", "--rank-of", 8, "--seed", 7, "--space", space, "--tokens", "8,64", "--reserve-sms", 4)
    assert "a model for 132 SMs, 4 reserved" in megamoe(*args).out
    assert megamoe(*args, "--json").json["plan"]["reserve_sms"] == 4
    refused = megamoe(*args[:-1], 132)
    assert refused.code == 2 and "reserve_sms=132 leaves no SM for the kernel" in refused.err
    wide = replace(SMALL, ctas=130)
    whole, _ = make_plan(Request(SHAPE, sizes=(8,), space=space, seed=3, extra=[wide]))
    with pytest.raises(UsageError, match="at most 128 per rank"):
        make_plan(Request(SHAPE, sizes=(8,), space=space, seed=3, extra=[wide], reserve_sms=4))
    plan, _ = make_plan(Request(SHAPE, sizes=(8,), space=space, seed=3, reserve_sms=4))
    assert plan.shared_sms() == 128 and whole.shared_sms() == 132
    task = plan.task("final", 8, "uniform", SMALL, BIG, 16)
    assert plan.key(task) != whole.key(task), "other grids: another trial"
    assert worker_command(plan)[-6:-4] == ["--reserve-sms", "4"] and "--reserve-sms" not in worker_command(whole)
    assert fitted(wide, 1, 128).ctas == 0 and fitted(wide, 1, 132) == wide == fitted(wide, 1, None)


def test_a_backend_that_this_machine_lacks_is_exit_3(megamoe, tmp_path) -> None:
    answer = megamoe("tune", "--backend", "virtual", "--results-dir", tmp_path)
    assert answer.code == 3 and "needs an SM90 GPU" in answer.err


def test_help_imports_no_torch(megamoe) -> None:
    import subprocess
    import sys

    from tests.tuning.rig import ROOT

    code = ("import sys; from megamoe_cli.cli.main import main\n"
            "codes = [main([name, '--help']) for name in ('tune', 'table')] + [main(['tune', '--plan']), main(['table', 'check'])]\n"
            "print('HEAVY', codes, [m for m in ('torch', 'cupy', 'numpy') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.splitlines()[-1] == "HEAVY [0, 0, 0, 0] []", done.stderr


# -- without a GPU ---------------------------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch):
    """Stands in for NVRTC: every kernel has the registers its tile suggests; ``refuse`` are block_m that spill."""
    state = SimpleNamespace(refuse=set(), built=[])

    def build_many(requests, jobs=None, on_done=lambda outcome: None):
        outcomes = []
        for request in requests:
            state.built.append(request.config)
            kernel = SimpleNamespace(resources=SimpleNamespace(registers=100 + request.config.block_m // 2, spills=0), hit=True, seconds=0.1,
                                     manifest={"compiler": "NVRTC 13.5"})
            error = BuildFailed("4 bytes of spill stores") if request.config.block_m in state.refuse else None
            outcomes.append(driver.Outcome(request, kernel, error))
            on_done(outcomes[-1])
        return outcomes

    monkeypatch.setattr(driver, "build_many", build_many)
    return state


def test_without_a_gpu_it_ranks_by_a_model_and_calls_it_one(megamoe, compiler, space, tmp_path) -> None:
    args = ("tune", "--rank-of", 8, "--space", space, "--tokens", "8,512,8192", "--seed", 1, "--results-dir", tmp_path / "r")
    answer = megamoe(*args)
    assert answer.code == 0 and "ranking (model)" in answer.out and "model us" in answer.out and "registers" in answer.out
    (path,) = (tmp_path / "r").glob("*-tune-*/table.yaml")
    table, problems = check_file(path)
    assert table.source == "static" and [p for p in problems if p.severity == "error"] == []
    assert all(row.model_us and row.median_us is None and not row.verdict for row in table.evidence)
    assert "model_us" in path.read_text() and "median_us" not in path.read_text()
    # What the model says is at least plausible: large tiles for large loads.
    assert table.configs[table.range_at(8192 * 6 / 32).use].config.block_m == 128
    document = megamoe(*args[:-1], tmp_path / "q", "--json").json
    assert document["source"] == "static" and {"model_us", "registers", "ctas_per_sm", "waves"} <= set(document["sizes"]["8"][0])


def test_a_ranking_is_not_resumed(megamoe, compiler, space, tmp_path) -> None:
    """Nothing was measured, so the answer is neither about another machine nor a promise."""
    assert megamoe("tune", "--rank-of", 8, "--space", space, "--tokens", 8, "--seed", 1, "--results-dir", tmp_path / "r").code == 0
    answer = megamoe("tune", "--resume", "--results-dir", tmp_path / "r")
    assert answer.code == 2 and "nothing was measured" in answer.err and "start it again" in answer.err, answer.err


def test_a_kernel_that_spills_is_no_candidate(megamoe, compiler, space, tmp_path) -> None:
    compiler.refuse = {16}
    answer = megamoe("tune", "--rank-of", 8, "--space", space, "--config", "block_m=16", "--tokens", "8", "--results-dir", tmp_path, "--json")
    assert all("spill" in why for why in answer.json["refused"].values()) and len(answer.json["refused"]) == 1
    assert not [row for row in answer.json["sizes"]["8"] if row["config"]["block_m"] == 16]
    compiler.refuse = {32}
    answer = megamoe("tune", "--rank-of", 8, "--space", space, "--tokens", "8", "--results-dir", tmp_path)
    assert answer.code == ExitCode.BUILD_FAILED and "the incumbent" in answer.err


def test_build_only_compiles_each_kernel_once(megamoe, compiler, space) -> None:
    answer = megamoe("tune", "--rank-of", 8, "--space", space, "--build-only")
    plan, _ = make_plan(Request(SHAPE, space=space, seed=1))
    assert answer.code == 0 and len(compiler.built) == len(kernels_of(plan.candidates)) >= 3 < len(plan.candidates)


def test_cubins_travel_to_another_machine(megamoe, tmp_path, monkeypatch) -> None:
    """Built here by one compiler, taken there from the folder, whatever compiler is there; what is missing is compiled."""
    from megamoe_cli.compile import nvrtc
    from megamoe_cli.tuning import compiling

    calls: list[str] = []

    def compile_cubin(text: str, *args: object, name: str, **options: object) -> tuple[bytes, str]:
        calls.append(text)
        return b"cubin of " + text[-300:].encode(), "ptxas info    : Compiling entry function 'mega_moe' for 'sm_90a'\nptxas info    : Used 168 registers\n"

    def machine(name: str, size: int) -> None:
        monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path / name))
        monkeypatch.setattr(driver, "_nvrtc", lambda: nvrtc.Compiler((13, size), "", f"nvrtc 13.{size}"))

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    for name in ("MEGAMOE_PREBUILT", "MEGAMOE_REMOTE_COMPILER"):
        monkeypatch.setenv(name, "")  # so that what the command sets is undone
        monkeypatch.delenv(name)
    (tmp_path / "s.yaml").write_text(SPACE.replace("[32, 64, 128]", "[64, 128]"))
    args = ("tune", "--rank-of", 8, "--tokens", "1024", "--incumbent", "default", "--space", f"{tmp_path / 's.yaml'}:default", "-j", 1)
    machine("here", 5)
    answer = megamoe(*args, "--build-only", "--cubins", tmp_path / "cubins")
    assert answer.code == 0 and f"2 kernels built in " in answer.out and f"{tmp_path / 'cubins'} holds" in answer.out
    assert len(calls) == 2 and len(list((tmp_path / "cubins").glob("*.cubin"))) == 2
    stale = tmp_path / "cubins" / "old.json"
    stale.write_text('{"source_digest": "of other sources"}')
    megamoe(*args, "--shape", "v3", "--build-only", "--cubins", tmp_path / "cubins")
    assert not stale.exists() and len(list((tmp_path / "cubins").glob("*.cubin"))) >= 2, "another shape's kernels come beside"
    machine("there", 0)
    calls.clear()
    (tmp_path / "s.yaml").write_text(SPACE)
    answer = megamoe(*args, "--cubins", tmp_path / "cubins", "--static", "--results-dir", tmp_path / "r", "--json")
    assert answer.code == 0 and len(calls) == 1 and "kBlockM = 32" in calls[0], "only what was not brought along"
    assert megamoe(*args, "--cubins", tmp_path, "--static").code == 2
    assert compiling.Built().sent == 0


@pytest.mark.slow
def test_a_real_compilation_gives_facts(megamoe, tmp_path, monkeypatch) -> None:
    """One kernel through NVRTC: the registers and the absence of spills are the compiler's."""
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "one.yaml").write_text("schema: megamoe.space/1\nspaces:\n  default: {block_m: [128]}\n")
    answer = megamoe("tune", "--shape", "4096x2048x32x6", "--space", f"{tmp_path / 'one.yaml'}:default", "--tokens", "1024", "--incumbent",
                     "default", "--results-dir", tmp_path, "--json")
    (row,) = answer.json["sizes"]["1024"]
    assert row["spill_bytes"] == 0 and 100 < row["registers"] <= 168 and row["ctas_per_sm"] == 1
    assert answer.json["compiler"].startswith("NVRTC") or "13." in answer.json["compiler"]


def test_the_model_obeys_its_bounds() -> None:
    from megamoe_cli.tuning.space import resolved

    for m in (16, 32, 64, 128):
        choice = resolved(Choice(type(BIG.config)(block_m=m)), SHAPE, 1)
        times = [facts(choice, SHAPE, 1, 132, tokens) for tokens in (0, 1, 8, 64, 512, 4096)]
        assert all(a.model_us <= b.model_us for a, b in zip(times, times[1:])), "more tokens never take less time"
        assert all(f.model_us > f.floor_us for f in times) and times[0].tiles == 0
        assert ctas_per_sm(choice, times[0].smem_bytes) == 1
    few = facts(resolved(Choice(BIG.config, ctas=66), SHAPE, 1), SHAPE, 1, 132, 4096)
    assert few.model_us > 1.5 * times[-1].model_us and few.ctas == 66


# -- what a terminal shows -------------------------------------------------------------------------


def trial(tokens: int, status: str = "ok", ratio: float = 0.9, stage: str = "final") -> Trial:
    return Trial("k", stage, tokens, "uniform", 1, SMALL.to_dict(), BIG.to_dict(), status, pairs=[[100 * ratio, 100.0]] * 8, message="why", seconds=0.5)


def test_the_live_view_shows_done_of_total_eta_best_and_refusals(monkeypatch, space) -> None:
    plan, _ = make_plan(Request(SHAPE, sizes=(8, 64), space=space, seed=3))
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    app = App()
    with TuneView(app, plan, 20, 60.0) as view:
        assert view.live is not None
        view.stage("8 tokens: halving")
        for t in (trial(8), trial(64, "hang"), trial(64)):
            view.trial(t, replayed=False)
        from rich.console import Console

        console = Console(file=io.StringIO(), width=120)
        console.print(view._draw())
        shown = console.file.getvalue()
    for words in ("3/~20 trials", "8s left", "halving", "refused: 1 hang", "0.900", "m32"):
        assert words in shown, shown
    assert "hang: m32" in stream.getvalue()


def test_off_a_terminal_a_heartbeat_at_most_every_30_s(monkeypatch, capsys, space) -> None:
    plan, _ = make_plan(Request(SHAPE, sizes=(8,), space=space, seed=3))
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("megamoe_cli.report.tune_view.time", SimpleNamespace(monotonic=lambda: clock.now))
    with TuneView(App(), plan, 20) as view:
        for second in range(0, 100):
            clock.now = float(second)
            view.trial(trial(8), replayed=False)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 4 and "trials" in lines[0]


def test_quiet_says_nothing_but_failures_do_not_hide(capsys, space) -> None:
    plan, _ = make_plan(Request(SHAPE, sizes=(8,), space=space, seed=3))
    with TuneView(App(verbosity=-1), plan, 20) as view:
        view.stage("x")
        view.trial(trial(8, "crash"), replayed=False)
    assert capsys.readouterr().err == ""
    assert view.refused == {"crash": 1}
