"""Old names of modules that have moved, as version 0.1 documented them: importing one gives the module itself."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMES = {
    "gradlab.analysis.bucket_time": "gradlab.analysis.layer_plan.bucket_time",
    "gradlab.analysis.calibration": "gradlab.analysis.forecast.calibration",
    "gradlab.analysis.estimator": "gradlab.analysis.fit.sklearn_estimator",
    "gradlab.analysis.information": "gradlab.analysis.measure.information",
    "gradlab.analysis.lgc_plots": "gradlab.analysis.figures.lgc",
    "gradlab.analysis.plans_over_time": "gradlab.analysis.layer_plan.over_time",
    "gradlab.analysis.rate_distortion": "gradlab.analysis.measure.rate_distortion",
    "gradlab.analysis.sensitivity": "gradlab.analysis.layer_plan.sensitivity",
    "gradlab.analysis.setting_grids": "gradlab.analysis.layer_plan.grids",
    "gradlab.autoencoder": "gradlab.learning.autoencoder",
    "gradlab.bits": "gradlab.coding.bits",
    "gradlab.blocks": "gradlab.codec.blockwise",
    "gradlab.capture.residual": "gradlab.capture.residual_sums",
    "gradlab.codec_settings": "gradlab.codec.settings",
    "gradlab.indices": "gradlab.coding.positions",
    "gradlab.lgc_plan": "gradlab.plan.lgc_recipe",
    "gradlab.methods": "gradlab.plan.recipes",
    "gradlab.planner": "gradlab.knapsack",
    "gradlab.random_bits": "gradlab.coding.random_bits",
    "gradlab.ring": "gradlab.collectives.ring",
    "gradlab.slice_pca": "gradlab.learning.slice_pca",
    "gradlab.sparse": "gradlab.codec.sparsifier",
    "gradlab.wrapper": "gradlab.codec.wrapper",
}


class MovedModules:
    """Finder and loader: importing an old name gives the module that took its place."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in NAMES else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        # What stands in sys.modules after this is what the import gives.
        sys.modules[module.__name__] = importlib.import_module(NAMES[module.__name__])
