"""Measure recorded gradients, fit codecs to them, replay plans over them, and report.

    replays = replay_plans(trace, {"powersgd": plan})              # what plans do to recorded gradients
    times = forecast.forecast(plan, forecast.Network())            # how long their steps take
    write_trace_report(trace, "report", examine(trace))            # everything, as a page

`replay` and `forecast` are rooms of their own: `replay.replay` takes one plan. Each name is imported when it is first
asked for.
"""

from typing import TYPE_CHECKING

from gradlab.lazy import lazy_names

if TYPE_CHECKING:
    from gradlab.analysis import forecast, replay
    from gradlab.analysis.fit.gradiveq import GradiveqFit, GradiveqOptions, fit_gradiveq
    from gradlab.analysis.fit.lgc.fit import LgcFit, LgcOptions, fit_lgc
    from gradlab.analysis.fit.signs import BlockFit, fit_block_sizes
    from gradlab.analysis.forecast import Network
    from gradlab.analysis.layer_plan.lgreco import LgrecoFit, LgrecoOptions, fit_lgreco
    from gradlab.analysis.replay import replay_plans
    from gradlab.analysis.report.examine import examine
    from gradlab.analysis.report.trace_report import Examination, write_comparison, write_trace_report

__all__ = [
    "BlockFit",
    "Examination",
    "GradiveqFit",
    "GradiveqOptions",
    "LgcFit",
    "LgcOptions",
    "LgrecoFit",
    "LgrecoOptions",
    "Network",
    "examine",
    "fit_block_sizes",
    "fit_gradiveq",
    "fit_lgc",
    "fit_lgreco",
    "forecast",
    "replay",
    "replay_plans",
    "write_comparison",
    "write_trace_report",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "BlockFit": "gradlab.analysis.fit.signs",
        "Examination": "gradlab.analysis.report.trace_report",
        "GradiveqFit": "gradlab.analysis.fit.gradiveq",
        "GradiveqOptions": "gradlab.analysis.fit.gradiveq",
        "LgcFit": "gradlab.analysis.fit.lgc.fit",
        "LgcOptions": "gradlab.analysis.fit.lgc.fit",
        "LgrecoFit": "gradlab.analysis.layer_plan.lgreco",
        "LgrecoOptions": "gradlab.analysis.layer_plan.lgreco",
        "Network": "gradlab.analysis.forecast",
        "examine": "gradlab.analysis.report.examine",
        "fit_block_sizes": "gradlab.analysis.fit.signs",
        "fit_gradiveq": "gradlab.analysis.fit.gradiveq",
        "fit_lgc": "gradlab.analysis.fit.lgc.fit",
        "fit_lgreco": "gradlab.analysis.layer_plan.lgreco",
        "forecast": "gradlab.analysis.forecast",
        "replay": "gradlab.analysis.replay",
        "replay_plans": "gradlab.analysis.replay",
        "write_comparison": "gradlab.analysis.report.trace_report",
        "write_trace_report": "gradlab.analysis.report.trace_report",
    },
)
