"""From a configuration and a phase to a checked, cached binary. No torch, no cupy in this process."""

from megamoe_cli.compile.artifact import BuiltKernel
from megamoe_cli.compile.driver import BuildRequest, Outcome, build, build_many, build_runtime

__all__ = ["BuildRequest", "BuiltKernel", "Outcome", "build", "build_many", "build_runtime"]
