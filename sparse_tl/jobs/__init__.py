"""Complete jobs from settings to an output folder; the command line runs these.

Public names are listed in `__init__.pyi` and loaded on first use, since commands show help first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
