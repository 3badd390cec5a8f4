"""GradiVeQ's compressor of slices as a scikit-learn estimator: in pipelines, grid searches and notebooks.

Yu, Lin, et al., "GradiVeQ", NeurIPS 2018, eqs. (3), (5) and (6): a slice x of K values becomes U^T (x - mu), d numbers,
and U of them plus mu. Axes come from `gradlab.learning.slice_pca`, as those of the codec `gradiveq`: fitted on the same
slices, both have the same basis.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_array
from sklearn.utils.validation import check_is_fitted

from gradlab.errors import GradlabError
from gradlab.learning.slice_code import SliceCode
from gradlab.learning.slice_pca import dimension, fitted_samples, principal_axes

_DTYPES = (np.float64, np.float32)


class GradientPCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """PCA of gradient slices: rows of X (n_samples, n_features) are samples of one slice of K = n_features values.

        compressor = GradientPCA(loss_threshold=0.05).fit(slices[:100])     # L_t = 100 iterations
        compressor.loss(slices[100:])                                        # what the later ones lose

    Differs from scikit-learn's PCA in the rule for d, in eigenvalues, which are of a covariance over n_samples and not
    n_samples - 1, and in that it can leave the mean where it is. Results have the type, float32 or float64, of the
    samples fitted on; axes are found in float64.

    >>> from gradlab.analysis import GradientPCA
    >>> slices = Trace("trace").mean("head.weight")[:, :32]
    >>> compressor = GradientPCA(n_components=4).fit(slices[:30])
    >>> compressor.transform(slices[30:]).shape, compressor.loss(slices[:30]) < 1
    ((10, 4), True)

    Args:
        n_components: d, or None for eq. (6). As the codec, it keeps at most the axes along which the samples vary.
        loss_threshold: lambda of eq. (6), the share of variance given up, in [0, 1); unused where d is given.
        whitening: subtract the samples' mean, the paper's whitening vector, as eq. (3) does.
    Attributes:
        components_: (d, K), orthonormal rows, most variance first; the largest entry of each is positive.
        mean_: (K,), mu; zeros without whitening.
        explained_variance_: (d,), float64, the variance along each axis (the mean square, without whitening); infinite
            or 0 where float64 ends.
        n_components_: d; n_features_in_: K; feature_names_in_: (K,), if X named its columns.
    """

    def __init__(
        self, n_components: int | None = None, *, loss_threshold: float = 0.01, whitening: bool = True
    ) -> None:
        self.n_components = n_components
        self.loss_threshold = loss_threshold
        self.whitening = whitening

    def fit(self, X: Any, y: Any = None) -> GradientPCA:
        """Find mean and axes of samples X (n_samples, K).

        Raises:
            GradlabError: for a setting out of range; ValueError: for fewer than two samples, or values that are not
                finite.
        """
        self._check_settings()
        samples = self._validated(X, fitting=True)
        exponent = _exponent(samples)  # squares of large and of small values are no numbers of their type
        samples = np.ldexp(samples, -exponent)
        mean = (samples.mean(0, dtype=np.float64) if self.whitening else np.zeros(samples.shape[1])).astype(
            samples.dtype
        )
        self.mean_ = np.ldexp(mean, exponent)
        # One slice, fitted on itself.
        (centred,) = fitted_samples(_tensor(samples)[:, None], _tensor(mean)[None], [[0]])
        values, axes = _at_least_one(*principal_axes(centred.flatten(0, 1)))
        self.n_components_ = min(self._dimension(values), len(values))
        self.components_ = _array(axes[:, : self.n_components_].T, samples.dtype)
        with np.errstate(over="ignore"):
            self.explained_variance_ = np.ldexp(values[: self.n_components_].numpy(), 2 * exponent)
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Compress slices X (n_samples, K) to codes (n_samples, d), eq. (3).

        Raises:
            NotFittedError: before `fit`; ValueError: for another K, or values that are not finite.
        """
        check_is_fitted(self)
        slices = self._validated(X, fitting=False)
        centred = _tensor(slices - self.mean_, self.components_.dtype)
        return self._code().encode(centred).view(len(slices), self.n_components_).numpy()

    def inverse_transform(self, X: Any) -> np.ndarray:
        """Decompress codes X (n_samples, d) to slices (n_samples, K), eq. (5).

        Raises:
            NotFittedError: before `fit`; GradlabError: for another d; ValueError: for values that are not finite.
        """
        check_is_fitted(self)
        codes = check_array(X, dtype=_DTYPES)
        if codes.shape[1] != self.n_components_:
            raise GradlabError(f"codes of {codes.shape[1]} values, expected d = {self.n_components_}")
        numbers = _tensor(codes, self.components_.dtype)
        return self._code().decode(numbers, numbers.new_empty(len(codes), len(self.mean_))).numpy() + self.mean_

    def loss(self, X: Any) -> float:
        """Measure ||xhat - x||^2 / ||x||^2 over slices X (n_samples, K), as in Fig. 5; 0 for zeros.

        Raises:
            NotFittedError, ValueError: as `transform`.
        """
        left = self.inverse_transform(self.transform(X))
        slices = self._validated(X, fitting=False)
        exponent = _exponent(slices)
        left, slices = (np.ldexp(one, -exponent) for one in (left - slices, slices))
        energy = np.square(slices, dtype=np.float64).sum()
        return float(np.square(left, dtype=np.float64).sum() / energy) if energy > 0 else 0.0

    def score(self, X: Any, y: Any = None) -> float:
        """Return 1 - loss(X), which a grid search maximises."""
        return 1.0 - self.loss(X)

    @property
    def _n_features_out(self) -> int:
        return int(self.n_components_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _check_settings(self) -> None:
        kept, allowed = self.n_components, self.loss_threshold
        if kept is not None and not (isinstance(kept, Integral) and not isinstance(kept, bool) and kept >= 1):
            raise GradlabError(f"GradientPCA: n_components = {kept!r}, expected d, at least 1, or None for eq. (6)")
        if not 0 <= allowed < 1:
            raise GradlabError(f"GradientPCA: loss_threshold = {allowed!r}, expected lambda in [0, 1) (eq. 6)")

    def _dimension(self, values: torch.Tensor) -> int:
        return dimension(values, self.loss_threshold) if self.n_components is None else int(self.n_components)

    def _validated(self, X: Any, *, fitting: bool) -> np.ndarray:
        """X as an array (n_samples, K); its K and column names are kept, or compared with those kept."""
        rules = {"dtype": _DTYPES, "ensure_min_samples": 2 if fitting else 1}
        try:
            from sklearn.utils.validation import validate_data
        except ImportError:  # before scikit-learn 1.6
            return self._validate_data(X, reset=fitting, **rules)
        return validate_data(self, X, reset=fitting, **rules)

    def _code(self) -> SliceCode:
        """U of one slice."""
        return SliceCode(_tensor(self.components_).T[None])


def _at_least_one(values: torch.Tensor, axes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues (R,) and axes (K, R), R >= 1: as in the codec, constant samples get the first unit vector."""
    return (values, axes) if len(values) else (axes.new_zeros(1), torch.eye(len(axes), 1, dtype=axes.dtype))


def _exponent(values: np.ndarray) -> int:
    """Return e such that values / 2^e lie within (-1, 1), the largest beyond 1/2."""
    return int(np.frexp(np.abs(values).max())[1])


def _tensor(array: np.ndarray, dtype: Any = None) -> torch.Tensor:
    """A copy: memory that several processes share can only be read, which torch warns of."""
    return torch.from_numpy(np.array(array, dtype=dtype, order="C"))


def _array(tensor: torch.Tensor, dtype: Any) -> np.ndarray:
    return np.ascontiguousarray(tensor.numpy(), dtype=dtype)
