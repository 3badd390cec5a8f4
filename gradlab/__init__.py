"""gradlab: record gradients, fit compressors on them, train PyTorch DDP compressed.

The package itself imports nothing heavy; take what is needed from its parts: `gradlab.capture`,
`gradlab.analysis`, `gradlab.runtime`, `gradlab.datasets`, `gradlab.plan`, `gradlab.codecs`, `gradlab.collectives`.
"""

import os
import sys

from gradlab.moved import MovedModules
from gradlab.version import VERSION as __version__

__all__ = ["__version__"]

# Asked last, for names that nothing else knows.
sys.meta_path.append(MovedModules())

# In a checkout the side folders lie beside this one; in an installed package they lie in it.
_folder = os.path.dirname(__file__)
if not os.path.isdir(os.path.join(_folder, "capture")):
    __path__.append(os.path.dirname(_folder))
