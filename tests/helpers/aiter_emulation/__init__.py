"""AITER in plain torch: the functions our ROCm backends call, for machines without an AMD GPU.

Every function has the exact signature of a chosen AITER version, the layouts and in-place outputs
of the real kernel, and *raises* where that kernel would read garbage, leave rows untouched, make
the host wait or be missing on the architecture. It computes in float32 and knows nothing of our
backends. `install` makes it importable as `aiter`.

`machine` is the pretended machine, `signatures` the signatures by version, `reference` the maths;
the other files are one family of functions each. `compare_signatures` compares the table with an
installed `amd-aiter` or a checkout.
"""

from tests.helpers.aiter_emulation.install import install
from tests.helpers.aiter_emulation.machine import Machine, MisuseError

__all__ = ["Machine", "MisuseError", "install"]
