"""gradlab: record gradients, fit compressors on them, train PyTorch DDP compressed.

The package itself imports nothing heavy; take what is needed from its parts: `gradlab.capture`,
`gradlab.analysis`, `gradlab.runtime`, `gradlab.datasets`, `gradlab.plan`, `gradlab.codecs`, `gradlab.collectives`.
"""

import sys

from gradlab.moved import MovedModules
from gradlab.version import VERSION as __version__

__all__ = ["__version__"]

# Asked last, for names that nothing else knows.
sys.meta_path.append(MovedModules())
