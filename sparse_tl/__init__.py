"""Make a transformer's attention sparse without hurting its loss, and see what does a task.

The public names are listed in `__init__.pyi` and loaded on first use, so that importing the
package is fast (SPEC 1 of Scientific Python).
"""

import lazy_loader

__version__ = "0.3.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
