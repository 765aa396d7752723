"""The newest public SM90 implementation as a contender: the installed package, called through its own Python interface.

Only what its interface documents is used: its own weight transformation, its symmetric buffer (one rank, so a process group
of one), its launch call. It compiles kernels when they are first launched, with nvcc, one for each capacity and for some
token counts; ``peer_build`` does that ahead, in parallel.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EnvironmentUnfit
from ..layout import INPUT_VIEWS
from .contender import Contender, bytes_of, refuse

if TYPE_CHECKING:
    import torch

    from ..oracle.casedata import RankInputs, RankWeights
    from ..shapes import Problem

IMPORT_NAME = "deep_gemm"
DISTRIBUTION = "sgl-deep-gemm"
INSTALL = ("pip install sgl-deep-gemm==0.1.4 apache-tvm-ffi==0.1.11, with Python 3.12 or newer and torch 2.11; or sgl-deep-gemm==0.2.5 with "
           "torch 2.14")  # fmt: skip
CALLS = ("get_symm_buffer_for_mega_moe", "transform_weights_for_mega_moe_sm90", "fp8_mega_moe")


def check_installed() -> None:
    """EnvironmentUnfit when it is not; imports nothing."""
    if importlib.util.find_spec(IMPORT_NAME) is None:
        raise EnvironmentUnfit(f"the public package is not installed here (import name {IMPORT_NAME})", hint=INSTALL)


def load_package() -> Any:
    """The module. EnvironmentUnfit, in one line, when it is missing, is something else, or cannot compile here."""
    check_installed()
    if not int(os.environ.get("DG_JIT_USE_NVRTC", "0") or 0) and find_nvcc() is None:
        raise EnvironmentUnfit("the public package compiles its kernels with nvcc, and there is none here",
                               hint="put nvcc on the PATH or set CUDA_HOME")  # fmt: skip
    try:
        package = importlib.import_module(IMPORT_NAME)
    except Exception as error:  # its import loads and initialises a binary module: whatever that raises
        first = next(iter(str(error).splitlines()), "")
        raise EnvironmentUnfit(f"the public package does not load here: {type(error).__name__}: {first}", hint=INSTALL) from error
    missing = [name for name in CALLS if not callable(getattr(package, name, None))]
    if missing:
        raise EnvironmentUnfit(f"the installed {IMPORT_NAME} {version_of(package)} has no {missing[0]}: it is not the one with "
                               "an SM90 mega kernel", hint=INSTALL)  # fmt: skip
    return package


def version_of(package: Any) -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(package, "__version__", "unknown"))


def find_nvcc() -> str | None:
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home:
            path = Path(home) / "bin" / "nvcc"
            return str(path) if path.is_file() else None  # the package looks there and nowhere else
    usual = Path("/usr/local/cuda/bin/nvcc")
    return shutil.which("nvcc") or (str(usual) if usual.is_file() else None)


def group_of_one() -> Any:
    """A torch process group of this process alone; no network is used. One that exists already must be of one rank."""
    import torch.distributed as dist

    # Multicast objects belong to several GPUs, and creating one needs rights that a container may lack.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() != 1:
        raise EnvironmentUnfit(f"this process is one of {dist.get_world_size()} ranks; the comparison runs on one")
    return dist.group.WORLD


class Peer(Contender):
    name = "peer"

    def __init__(self, package: Any, group: Any = None) -> None:
        self.package, self.version = package, version_of(package)
        self._group = group
        self._natural: RankWeights | None = None
        self._layers: tuple[Any, Any] = (None, None)
        self._buffer: Any = None
        self._capacity: tuple[Any, ...] = ()
        # Newer releases choose their schedule by the largest token count of any rank.
        self._bounded = "num_tokens_bound" in inspect.signature(package.fp8_mega_moe).parameters

    def prepare(self, problem: Problem, weights: RankWeights) -> None:
        if problem.ranks != 1:
            raise refuse(self, f"{problem.ranks} ranks; it is compared on one")
        self.transform(weights)
        self.allocate(problem, weights.w13.device)

    def transform(self, weights: RankWeights) -> None:
        """Once for each object."""
        if self._natural is not weights:
            self._layers = self.package.transform_weights_for_mega_moe_sm90((weights.w13, weights.w13_sf), (weights.w2, weights.w2_sf))
            self._natural = weights

    def allocate(self, problem: Problem, device: Any, rank: int = 0) -> None:
        """Buffer and output of a rank of ``problem``."""
        import torch

        shape, key = problem.shape, (problem.shape, problem.capacity)
        if self._capacity != key:
            self._drop_buffer()
            self._group = self._group or group_of_one()
            self._buffer = self.package.get_symm_buffer_for_mega_moe(self._group, shape.experts, problem.capacity, shape.topk, shape.hidden,
                                                                     shape.intermediate)  # fmt: skip
            self._capacity = key
        self._tokens, self._bound = problem.tokens[rank], max(problem.tokens)
        self._y = torch.empty(self._tokens, shape.hidden, dtype=torch.bfloat16, device=device)

    def use_layers(self, l1: tuple[Any, Any], l2: tuple[Any, Any]) -> None:
        """Weights that are in its form already (or whose values do not matter)."""
        self._layers = (l1, l2)

    def load(self, inputs: RankInputs) -> None:
        for name in INPUT_VIEWS:
            own, given = getattr(self._buffer, name)[: self._tokens], getattr(inputs, name)
            if own.shape != given.shape or own.element_size() != given.element_size():
                raise refuse(self, f"its buffer has {name} {list(own.shape)} of {own.dtype}, ours is {list(given.shape)} of {given.dtype}")
            bytes_of(own).copy_(bytes_of(given))

    def enqueue(self) -> None:
        more = {"num_tokens_bound": self._bound} if self._bounded else {}
        self.package.fp8_mega_moe(self._y, *self._layers, self._buffer, **more)

    def output(self) -> torch.Tensor:
        return self._y

    def _drop_buffer(self) -> None:
        if self._buffer is not None and hasattr(self._buffer, "destroy"):
            self._buffer.destroy()
        self._buffer, self._capacity = None, ()

    def close(self) -> None:
        self._drop_buffer()
        self._natural, self._layers = None, (None, None)
