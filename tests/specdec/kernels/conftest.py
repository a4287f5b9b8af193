"""Which files a run in Triton's interpreter takes."""

import os
from pathlib import Path

# The others have run without it, and would only be slower: engines would check their kernels.
collect_ignore = (
    [
        file.name
        for file in Path(__file__).parent.glob("test_*.py")
        if "require_triton()" not in file.read_text()
    ]
    if os.environ.get("TRITON_INTERPRET") == "1"
    else []
)
