"""The layer as a chain of separate kernels in a CUDA graph: what one would write without a fused kernel.

Sort the (token, slot) pairs by expert, gather the rows, grouped GEMM, SwiGLU times routing weight, quantize, grouped GEMM,
un-sort, sum. All sizes in the chain are fixed, the routing is read on the device: one graph serves every routing. On one
rank no communication is missing. Two sources of grouped GEMMs:

* torch's, which takes one scale per row: weights and tokens are re-quantized that way ahead of time (not timed);
* the public package's masked ones, which take the layer's own scales; rows then lie expert by expert in slots for T rows.

Masked slots (id -1) and a token's experts that are not distinct are not handled: the routings of ``bench`` have neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import EnvironmentUnfit
from ..shapes import SCALE_BLOCK
from .contender import Contender, bytes_of, refuse
from .peer import version_of

if TYPE_CHECKING:
    import torch

    from ..oracle.casedata import RankInputs, RankWeights
    from ..shapes import Problem, Shape

    from .timing import Device

E4M3_MAX = 448.0
PEER_CALLS = ("m_grouped_fp8_fp4_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked")


class Sorted(NamedTuple):
    """Entries (token, slot) by expert: ``order`` [M] are their positions in the flat ids, ``experts`` [M] ascending,
    ``ends`` [E] int32 where each expert's entries end, M = T*K."""

    order: torch.Tensor
    experts: torch.Tensor
    ends: torch.Tensor


class Gemms(Protocol):
    """A source of grouped GEMMs. ``place``: rows in sorted order -> operand; ``take``: result -> rows in sorted order."""

    name: str
    limits: tuple[float, float]
    scale_columns: int | None  # columns that share a scale; None: the whole row

    def weights(self, shape: Shape, weights: RankWeights) -> tuple[Any, Any]: ...
    def place(self, codes: torch.Tensor, scales: torch.Tensor, entries: Sorted, tokens: int) -> Any: ...
    def multiply(self, operand: Any, weights: Any, entries: Sorted) -> torch.Tensor: ...
    def take(self, result: torch.Tensor, entries: Sorted, tokens: int) -> torch.Tensor: ...


class Unfused(Contender):
    """``multiply`` of ``gemms`` does the products; the rest is torch. Runs as a replayed graph when ``device`` can capture."""

    def __init__(self, name: str, gemms: Gemms, device: Device | None) -> None:
        self.name, self.gemms, self.device = name, gemms, device
        self.version, self.limits = gemms.name, gemms.limits
        self._natural: RankWeights | None = None
        self._replay: Callable[[], None] | None = None

    def prepare(self, problem: Problem, weights: RankWeights) -> None:
        import torch

        if problem.ranks != 1:
            raise refuse(self, f"{problem.ranks} ranks; the chain has no communication")
        shape, tokens, device = problem.shape, problem.tokens[0], weights.w13.device
        if self._natural is not weights:
            self._w13, self._w2 = self.gemms.weights(shape, weights)
            self._natural = weights
        columns = self.gemms.scale_columns or shape.hidden
        self._shape, self._replay = shape, None
        self._x = torch.zeros(tokens, shape.hidden, dtype=torch.float8_e4m3fn, device=device)
        self._x_sf = torch.ones(tokens, shape.hidden // columns, device=device)
        # Distinct experts from the start: an expert has room for each token once.
        self._ids = torch.arange(shape.topk, device=device).expand(tokens, -1).contiguous()
        self._topk_weights = torch.zeros(tokens, shape.topk, device=device)
        self._y = torch.empty(tokens, shape.hidden, dtype=torch.bfloat16, device=device)
        if self.device is not None:
            self.enqueue()  # libraries make handles and workspaces at their first call, which no graph can capture
            self.device.wait(120.0)
            self._replay = self.device.capture(self.enqueue)

    def load(self, inputs: RankInputs) -> None:
        if self.gemms.scale_columns == SCALE_BLOCK:
            bytes_of(self._x).copy_(bytes_of(inputs.x))
            self._x_sf.copy_(inputs.x_sf)
        else:
            values = inputs.x.float().view(len(inputs.x), -1, SCALE_BLOCK) * inputs.x_sf[..., None]
            codes, scales = quantize(values.view(len(inputs.x), -1), self.gemms.scale_columns)
            bytes_of(self._x).copy_(bytes_of(codes))
            self._x_sf.copy_(scales)
        self._ids.copy_(inputs.topk_idx)
        self._topk_weights.copy_(inputs.topk_weights)

    def enqueue(self) -> None:
        import torch

        tokens, topk, gemms = self._ids.shape[0], self._shape.topk, self.gemms
        entries = sort_entries(self._ids, self._shape.experts)
        row = entries.order // topk
        operand = gemms.place(bytes_of(self._x)[row].view(self._x.dtype), self._x_sf[row], entries, tokens)
        both = gemms.take(gemms.multiply(operand, self._w13, entries), entries, tokens).float()
        gate, up = both.chunk(2, dim=1)
        acts = torch.nn.functional.silu(gate) * up * self._topk_weights.view(-1)[entries.order, None]
        operand = gemms.place(*quantize(acts, gemms.scale_columns), entries, tokens)
        rows = gemms.take(gemms.multiply(operand, self._w2, entries), entries, tokens)
        slots = torch.empty_like(rows)
        slots[entries.order] = rows
        self._y.copy_(slots.view(tokens, topk, -1).sum(1, dtype=torch.float32))

    def launch(self) -> None:
        (self._replay or self.enqueue)()

    def output(self) -> torch.Tensor:
        return self._y

    def close(self) -> None:
        self._replay = self._natural = None
        self._w13 = self._w2 = None


def sort_entries(ids: torch.Tensor, experts: int) -> Sorted:
    """``ids`` [T,K] in [0, experts)."""
    import torch

    found, order = torch.sort(ids.flatten(), stable=True)
    ends = torch.searchsorted(found, torch.arange(experts, device=ids.device), right=True)
    return Sorted(order, found, ends.int())


def quantize(values: torch.Tensor, columns: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """[M,N] f32 -> codes [M,N] e4m3, scales [M,N/columns] f32 (one for the row when None)."""
    import torch

    groups = values.view(values.shape[0], -1, columns or values.shape[1])
    scales = groups.abs().amax(2, keepdim=True).clamp_min(1e-10) / E4M3_MAX
    codes = (groups / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(values.shape), scales.squeeze(2)


class TorchGemms:
    """``torch._scaled_grouped_mm``: rows back to back, one scale per row of either operand."""

    # Four more roundings than the layer has (weights and operands of both products): about 7 %.
    limits = (0.12, 0.2)
    scale_columns = None

    def __init__(self) -> None:
        import torch

        if not hasattr(torch, "_scaled_grouped_mm"):
            raise EnvironmentUnfit(f"torch {torch.__version__} has no grouped FP8 product", hint="use --against unfused-peer")
        self.name = f"torch {torch.__version__} grouped GEMM"

    def weights(self, shape: Shape, weights: RankWeights) -> tuple[Any, Any]:
        return self._by_rows(weights.w13, weights.w13_sf), self._by_rows(weights.w2, weights.w2_sf)

    @staticmethod
    def _by_rows(codes: torch.Tensor, block_scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """e4m3 [E,N,K] with scales per 128x128 -> e4m3 [E,K,N] (K contiguous) with scales [E,N]."""
        import torch

        out, scales = torch.empty_like(codes), torch.empty(codes.shape[:2], device=codes.device)
        for expert in range(codes.shape[0]):
            n, k = codes.shape[1:]
            wide = codes[expert].float().view(n // SCALE_BLOCK, SCALE_BLOCK, k // SCALE_BLOCK, SCALE_BLOCK)
            one, scale = quantize((wide * block_scales[expert][:, None, :, None]).view(n, k), None)
            bytes_of(out[expert]).copy_(bytes_of(one))
            scales[expert] = scale[:, 0]
        return out.transpose(1, 2), scales

    def place(self, codes: torch.Tensor, scales: torch.Tensor, entries: Sorted, tokens: int) -> Any:
        return codes, scales[:, 0].contiguous()

    def multiply(self, operand: Any, weights: Any, entries: Sorted) -> torch.Tensor:
        import torch

        return torch._scaled_grouped_mm(operand[0], weights[0], operand[1], weights[1], offs=entries.ends, out_dtype=torch.bfloat16)

    def take(self, result: torch.Tensor, entries: Sorted, tokens: int) -> torch.Tensor:
        return result


class PeerGemms:
    """The package's masked grouped GEMMs: [E, T, K] operands of which each expert's first rows count."""

    limits = (0.06, 0.12)
    scale_columns = SCALE_BLOCK

    def __init__(self, package: Any) -> None:
        self._call = next((getattr(package, name) for name in PEER_CALLS if callable(getattr(package, name, None))), None)
        if self._call is None:
            raise EnvironmentUnfit(f"the installed package {version_of(package)} has no masked grouped FP8 GEMM")
        self.name = f"masked grouped GEMM of the package {version_of(package)}"

    def weights(self, shape: Shape, weights: RankWeights) -> tuple[Any, Any]:
        return (weights.w13, weights.w13_sf), (weights.w2, weights.w2_sf)

    @staticmethod
    def _slots(entries: Sorted, tokens: int) -> torch.Tensor:
        """Row of each entry in [E*T, ...]: its expert's T rows, from the first on."""
        import torch

        starts = torch.nn.functional.pad(entries.ends[:-1], (1, 0)).long()
        position = torch.arange(len(entries.order), device=entries.order.device) - starts[entries.experts]
        return entries.experts * tokens + position

    def place(self, codes: torch.Tensor, scales: torch.Tensor, entries: Sorted, tokens: int) -> Any:
        import torch

        experts, slots = len(entries.ends), self._slots(entries, tokens)
        operand = torch.empty(experts * tokens, codes.shape[1], dtype=codes.dtype, device=codes.device)
        operand_sf = torch.ones(experts * tokens, scales.shape[1], device=codes.device)
        bytes_of(operand)[slots] = bytes_of(codes)
        operand_sf[slots] = scales
        return operand.view(experts, tokens, -1), operand_sf.view(experts, tokens, -1)

    def multiply(self, operand: Any, weights: Any, entries: Sorted) -> torch.Tensor:
        import torch

        experts, tokens = operand[0].shape[:2]
        out = torch.empty(experts, tokens, weights[0].shape[1], dtype=torch.bfloat16, device=operand[0].device)
        counts = torch.diff(entries.ends, prepend=torch.zeros_like(entries.ends[:1]))
        self._call(operand, weights, out, counts, max(1, -(-len(entries.order) // experts)))
        return out

    def take(self, result: torch.Tensor, entries: Sorted, tokens: int) -> torch.Tensor:
        return result.view(-1, result.shape[2])[self._slots(entries, tokens)]
