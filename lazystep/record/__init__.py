"""Recording: ops in, programs out. The recorder itself is C++ (src/, typed in _recorder.pyi).

Reading order: src/handle.h, src/recorder.h, src/kernel.h, then handle, tensor, recorder, source, assemble,
observer, snapshot, written.
"""

from ..extensions import RECORDER

RECORDER.load()  # or an error that says how to build it
