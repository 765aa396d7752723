"""``megamoe trace``: what it refuses before anything runs, and what it says where there is no GPU."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("words,said", [
    (("--loop", "--part", "promotoin"), "nearest name: promotion"),
    (("--loop", "--part", ","), "at least one --part"),
    (("--loop", "--offset", "soon"), "numbers of cycles"),
    (("--loop", "--config", "policy=mma_sync,block_m=16"), "the loop alone"),
    (("--config", "block_m=63"), "block_m"),
    (("--config", "block_m=128,stages=8"), "shared memory"),
    (("--tokens", "-1"), "tokens"), (("--loop", "--tokens", "-1"), "tokens"), (("--loop", "--shape", "flahs"), "flash"),
    (("--rank-of", "7"), "7"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_2(megamoe, words: tuple[str, ...], said: str) -> None:
    answer = megamoe("trace", *words)
    assert answer.code == 2 and said in answer.err and answer.err.startswith("error: ") and len(answer.err.splitlines()) <= 2


@pytest.mark.parametrize("words", [("--tokens", "8"), ("--loop", "--part", "products")])
def test_without_a_gpu_it_says_so(megamoe, monkeypatch, words: tuple[str, ...]) -> None:
    monkeypatch.setattr("megamoe_cli.backends.driver.visible_gpus", lambda: [])
    answer = megamoe("trace", *words)
    assert answer.code == 3 and answer.err.startswith("error: no GPU is visible to this process\n") and len(answer.err.splitlines()) <= 2
