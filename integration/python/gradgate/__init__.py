"""gradgate: compress gradients only when it pays, and prove that it paid.

``gradgate.torch`` puts a gate in front of the gradient reduction of ``DistributedDataParallel``; ``gradgate.report``
turns a decision log into a page. Importing this package loads neither torch nor the native library, starts no thread
and touches no random state.
"""

from ._native import Error, library_path, native_version
from ._version import __version__

__all__ = ["Error", "__version__", "library_path", "native_version"]
