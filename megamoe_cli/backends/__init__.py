"""Where a kernel runs: ``pick`` chooses, the modules beside it do the work. No torch or cupy on import."""

from .base import Backend, Kernel, Program, RunResult
from .picking import Choice, pick

__all__ = ["Backend", "Choice", "Kernel", "Program", "RunResult", "pick"]
