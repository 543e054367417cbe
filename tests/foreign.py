"""Another interpreter, with torch and transformers: tests run scripts in it and exchange files.

`make transformers` builds one; VHAJAX_TRANSFORMERS_PYTHON names any other.
"""

import os
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
BUILT = TESTS.parent / ".venv-transformers"


def _find() -> str | None:
    named = os.environ.get("VHAJAX_TRANSFORMERS_PYTHON")
    built = BUILT / "bin/python"
    return named or (str(built) if (BUILT / "complete").exists() else None)


PYTHON = _find()
OLD = BUILT / "transformers4"
"""transformers 4, which lies beside the other: only where `make transformers` was run."""
VERSIONS = ("5", "4") if OLD.exists() else ("5",)
needed = pytest.mark.skipif(
    PYTHON is None,
    reason="there are no torch and transformers; run `make transformers`",
)


def run(script: str, *args: str, version: str = "5") -> None:
    """Runs a script of this folder there; fails with what it said."""
    assert PYTHON is not None
    settings = {n: x for n, x in os.environ.items() if n not in ("PYTHONPATH", "XLA_FLAGS")}
    settings |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    settings |= {"TOKENIZERS_PARALLELISM": "false"}
    if version == "4":
        settings["PYTHONPATH"] = str(OLD)
    done = subprocess.run(
        [PYTHON, str(TESTS / script), *args], capture_output=True, text=True, env=settings
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
