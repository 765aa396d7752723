"""All ranks are one unit: with two rank processes, the failure of one ends and respawns both."""

from __future__ import annotations

import pytest

from tests.tuning.rig import WIDE

BAD = {"block_m": 64, "stages": 3}


@pytest.mark.parametrize("kind, status", [("hang", "hang"), ("wrong", "wrong")])
def test_ranks_are_one_unit(rig, kind, status) -> None:
    """Two rank processes; the second one fails: the group is ended and respawned, and the candidate is gone for both."""
    rig.sizes, rig.space = "16", WIDE
    (rig.folder).mkdir(parents=True, exist_ok=True)
    rig.script |= {"processes": True, "faults": [{"match": BAD, "kind": kind, "rank": 1}]}
    args = [a for a in rig.fresh() if a not in ("--rank-of", "8")]
    answer = rig.run([*args, "--ranks", "2", "--shape", "256x256x16x6", "--candidate-timeout", "3"])
    assert answer.code == 0, answer.err
    bad = [t for t in rig.trials() if t["status"] != "ok"]
    assert [(t["status"], t["a"]["stages"]) for t in bad] == [(status, 3)]
    workers = {t["worker"] for t in rig.trials()}
    assert len(workers) >= (2 if kind == "wrong" else 3), "respawned after the failure, and fresh for the confirmation"
