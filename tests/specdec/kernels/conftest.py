"""Which files a run in Triton's interpreter takes."""

import os
from pathlib import Path

import pytest

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


@pytest.fixture
def kept_kernels(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier run has compiled is not compiled again: Triton knows it by the sources of the
    kernel and of all that it calls, the options, and its own version. `make clean` removes it.
    """
    cache = getattr(request.config, "cache", None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache.mkdir("triton") if cache else tmp_path))
