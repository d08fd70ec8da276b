"""Errors of rows that count as their effect on the model's predictions, and rounding with feedback.

Errors of a table matter more in some directions than in others: an error δ of a row costs ``δ M δᵀ``, where M
depends on the model (`shared_embeddings.compress.calibration`). Numbers are rounded one after another, and
those that follow make up for the error of those before (GPTQ, Frantar et al., 2023; in blocks as in QuIP#,
Tseng et al., 2024).

Axes: ``n`` rows, ``R`` numbers of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# The share of the mean of the diagonal that is added to it: directions that no text used count, too.
RIDGE = 0.1
# Numbers that are corrected at once; all that follow them are corrected after so many.
_TOGETHER = 32


class Metric:
    """A positive definite quadratic form of errors, from a positive semidefinite matrix M ``(R, R)``."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self._rotated: dict[int, Metric] = {}

    def seen_by(self, project: Callable[[Tensor], Tensor]) -> Metric:
        """The metric of rows in the coordinates of a linear map of hidden states ``(n, D)`` to ``(n, R)``."""
        return Metric(project(project(self.matrix).t().contiguous()))

    def rotated(self, count: int) -> Metric:
        """The metric of rows whose numbers from `count` on come first."""
        if count not in self._rotated:
            self._rotated[count] = Metric(self.matrix.roll((-count, -count), (0, 1)))
        return self._rotated[count]

    @functools.cached_property
    def upper(self) -> Tensor:
        """U of ``M**-1 = Uᵀ U``, in float32."""
        matrix = self.matrix.double()
        eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        inverse = torch.linalg.inv(matrix + RIDGE * matrix.diagonal().mean() * eye)
        return torch.linalg.cholesky(inverse, upper=True).float()

    def round(self, rows: Tensor, ends: Sequence[int], quantize: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Rounded rows ``(n, R)``.

        Args:
            ends: where each run of numbers that are rounded together ends; ascending up to R.
            quantize: returns the values ``(n, w)`` of a run, for the corrected numbers from its start on, and
                the number of the run.
        """
        left, values, first, opened = rows.clone(), torch.empty_like(rows), 0, 0
        pulls = torch.empty_like(rows)
        for number, last in enumerate(ends):
            run = slice(first, last)
            values[:, run] = quantize(left[:, first:], number)
            pulls[:, run] = torch.linalg.solve_triangular(
                self.upper[run, run], left[:, run] - values[:, run], upper=True, left=False
            )
            # Single numbers correct their neighbors at once, and all others together.
            closed = opened + _TOGETHER if last - first == 1 else rows.size(1)
            left[:, last:closed] -= pulls[:, run] @ self.upper[run, last:closed]
            if last >= closed:
                left[:, last:] -= pulls[:, opened:last] @ self.upper[opened:last, last:]
            if last >= closed or last - first > 1:
                opened = last
            first = last
        return values
