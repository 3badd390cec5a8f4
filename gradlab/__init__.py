"""gradlab: record gradients, fit compressors on them, train PyTorch DDP compressed.

`from gradlab import Plan, Wrap, Artifact, Trace, Layer, codecs, wrappers, compress, doctor` is the front door. `import
gradlab` loads no torch: each name is imported when it is first asked for. The rooms behind it: `gradlab.capture`,
`gradlab.analysis`, `gradlab.runtime`, `gradlab.datasets`, `gradlab.codec`, `gradlab.plan`, `gradlab.collectives`.
"""

import os
from typing import TYPE_CHECKING

from gradlab.errors import GradlabError
from gradlab.lazy import lazy_names
from gradlab.version import VERSION as __version__

if TYPE_CHECKING:
    from gradlab import codecs, wrappers
    from gradlab.artifact import Artifact
    from gradlab.layout import Layer
    from gradlab.plan import Plan, Wrap
    from gradlab.runtime.attach import compress
    from gradlab.runtime.pilot import Pilot
    from gradlab.trace import Trace
    from gradlab.training.doctor import doctor

__all__ = [
    "Artifact",
    "GradlabError",
    "Layer",
    "Pilot",
    "Plan",
    "Trace",
    "Wrap",
    "__version__",
    "codecs",
    "compress",
    "doctor",
    "wrappers",
]

# Where the names are that are not loaded yet; a module is its own home.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Artifact": "gradlab.artifact",
        "Layer": "gradlab.layout",
        "Pilot": "gradlab.runtime.pilot",
        "Plan": "gradlab.plan",
        "Trace": "gradlab.trace",
        "Wrap": "gradlab.plan",
        "codecs": "gradlab.codecs",
        "compress": "gradlab.runtime.attach",
        "doctor": "gradlab.training.doctor",
        "wrappers": "gradlab.wrappers",
    },
)

# In a checkout the side folders lie beside this one; in an installed package they lie in it.
_folder = os.path.dirname(__file__)
if not os.path.isdir(os.path.join(_folder, "capture")):
    __path__.append(os.path.dirname(_folder))
