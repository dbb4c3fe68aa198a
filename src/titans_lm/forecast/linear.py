"""Forecasters that are known beforehand or linear: repeat-last, seasonal naive, NLinear in closed form, DLinear."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from titans_lm.forecast.norm import InstanceNorm
from titans_lm.forecast.settings import Normalisation
from titans_lm.forecast.windows import Windows

Past = Float[Tensor, "B L C"]
Future = Float[Tensor, "B H C"]


class RepeatLast(nn.Module):
    """The last value of each channel, over and over: what any forecast has to beat."""

    def __init__(self, horizon: int) -> None:
        super().__init__()
        self.horizon = horizon

    def forward(self, x: Past) -> Future:
        return x[:, -1:].expand(-1, self.horizon, -1)


class SeasonalNaive(nn.Module):
    """The last season of each channel, over and over; ValueError where the lookback is shorter than a season."""

    def __init__(self, period: int, lookback: int, horizon: int) -> None:
        super().__init__()
        if not 1 <= period <= lookback:
            raise ValueError(
                f"got a season of {period} rows and a lookback of {lookback}; expected a lookback of a season or more"
            )
        self.register_buffer("places", lookback - period + torch.arange(horizon) % period, persistent=False)

    def forward(self, x: Past) -> Future:
        return x[:, self.places]


class Linear(nn.Module):
    """A linear map over time, the same for all channels, of a window that is normalised by itself.

    Normalised by its last value it is NLinear (Zeng et al., arXiv 2205.13504).
    """

    def __init__(
        self, lookback: int, horizon: int, channels: int, kind: Normalisation = "last", *, bias: bool = True
    ) -> None:
        super().__init__()
        self.norm = InstanceNorm(kind, channels)
        self.map = nn.Linear(lookback, horizon, bias=bias)

    def forward(self, x: Past) -> Future:
        z, found = self.norm(x)
        return self.norm.inverse(over_time(self.map, z), found)


class DLinear(nn.Module):
    """Trend and rest, each by a linear map over time shared by all channels (Zeng et al., arXiv 2205.13504).

    The trend is a moving average of `kernel` steps, the window's ends repeated; both maps start as the window's mean.
    """

    def __init__(self, lookback: int, horizon: int, kernel: int = 25) -> None:
        super().__init__()
        self.kernel = kernel
        self.trend, self.rest = nn.Linear(lookback, horizon), nn.Linear(lookback, horizon)
        for part in (self.trend, self.rest):
            nn.init.constant_(part.weight, 1.0 / lookback)

    def forward(self, x: Past) -> Future:
        before = (self.kernel - 1) // 2
        padded = F.pad(x.mT, (before, self.kernel - 1 - before), mode="replicate")
        trend = F.avg_pool1d(padded, self.kernel, stride=1).mT
        return over_time(self.trend, trend) + over_time(self.rest, x - trend)


def over_time(linear: nn.Module, x: Float[Tensor, "B L C"]) -> Float[Tensor, "B H C"]:
    """Apply a map of L values to H values to each channel."""
    return linear(x.mT).mT


class NormalEquations:
    """Sums over all windows and channels from which a linear map follows for any penalty, and its error.

        minimise Σ ‖W a + w − b‖² + λ ‖W‖²,   a = x − centre, b = y − centre
        [W w] = (Σ b [a 1]ᵀ) (Σ [a 1] [a 1]ᵀ + λ [I 0])⁻¹,     λ = penalty · mean of the diagonal of Σ a aᵀ

    A window's scale is left out: without w the map is linear, so it would divide and multiply, and errors would be
    weighed by it, while they are measured without. Windows overlap, so their products need not be made one by one:
    Σ u_{p+1} u_{q+1} is Σ u_p u_q without the first product and with the one behind the last.
    """

    def __init__(self, windows: Windows, kind: Normalisation, *, bias: bool) -> None:
        L, H = windows.lookback, windows.horizon
        self.count, self.bias = len(windows) * windows.channels, bias
        G, sums, squares = _products(windows.series.double(), len(windows), L, L + H)
        centre = torch.zeros(L, dtype=torch.float64)  # as weights of a window's values
        if kind == "mean":
            centre[:] = 1.0 / L
        elif kind == "last":
            centre[-1] = 1.0
        A = torch.eye(L, dtype=torch.float64) - centre  # a = A u, every row of it less the centre
        inner, cross, at_centre = G[:L], G[L:], centre @ G[:L]
        self.inputs = A @ inner @ A.T
        self.outputs = (cross - at_centre) @ A.T
        self.squares = float(squares[L:].sum() - 2.0 * (cross @ centre).sum() + H * (at_centre @ centre))
        if bias:
            a, b = A @ sums[:L], sums[L:] - centre @ sums[:L]
            corner = torch.tensor([[float(self.count)]], dtype=torch.float64)
            self.inputs = torch.cat([torch.cat([self.inputs, a[:, None]], 1), torch.cat([a[None], corner], 1)])
            self.outputs = torch.cat([self.outputs, b[:, None]], 1)

    def solved(self, penalty: float) -> Float[Tensor, "H L1"]:
        """Solve for the map, [W w] with a bias and W without."""
        L = len(self.inputs) - self.bias
        pull = torch.zeros(len(self.inputs), dtype=torch.float64)
        pull[:L] = penalty * (float(self.inputs.diagonal()[:L].mean()) or 1.0)  # of a constant series: W = 0
        return torch.linalg.solve(self.inputs + pull.diag(), self.outputs.T).T

    def error(self, found: Float[Tensor, "H L1"]) -> float:
        """Mean squared error of a map on the windows that were summed up."""
        inner = (found @ self.inputs * found).sum() - 2.0 * (found * self.outputs).sum()
        return (float(inner) + self.squares) / (self.count * len(found))

    def put(self, found: Float[Tensor, "H L1"], linear: nn.Linear) -> None:
        """Write a map into a linear layer."""
        with torch.no_grad():
            linear.weight.copy_(found[:, : linear.in_features])
            if self.bias:
                linear.bias.copy_(found[:, -1])


def _products(
    x: Float[Tensor, "R C"], windows: int, lookback: int, reach: int
) -> tuple[Float[Tensor, "M L"], Float[Tensor, " M"], Float[Tensor, " M"]]:
    """Sums over windows i and channels: Σ u_p u_q (M, L), Σ u_p and Σ u_p² (M,), with u_p = x_{i+p} and M = L + H."""
    first = torch.stack([(x[p : p + windows] * x[:windows]).sum(0) for p in range(reach)])  # (M, C)
    columns = [first]
    for q in range(lookback - 1):
        gone, come = x[: reach - 1] * x[q], x[windows : windows + reach - 1] * x[windows + q]
        columns.append(torch.cat([columns[0][q + 1 : q + 2], columns[-1][:-1] - gone + come]))
    sums, squares = (
        torch.stack([part[p : p + windows].sum() for p in range(reach)]) for part in (x.sum(1), x.square().sum(1))
    )
    return torch.stack([column.sum(1) for column in columns], dim=1), sums, squares
