"""Kernel times of one rank on one GPU, beside the floors of the routing really drawn and beside other implementations.

``timing`` knows how to time (and nothing of CUDA), ``contender`` what is timed, ``cuda_device`` the GPU; ``ours``, ``peer``
and ``unfused`` are the contenders, ``measured`` puts a row together. Importing this imports no torch.
"""

from .floors import E4M3_FLOPS, HBM_BYTES_PER_S, floors_us, slice_of
from .intervals import Estimate, median_interval
from .measured import Bench, Rival, Row

__all__ = ["E4M3_FLOPS", "HBM_BYTES_PER_S", "Bench", "Estimate", "Rival", "Row", "floors_us", "median_interval", "slice_of"]
