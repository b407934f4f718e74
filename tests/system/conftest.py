"""How tests of whole runs start Python."""

from __future__ import annotations

import pytest

from tests.support import warm_python


@pytest.fixture(scope="session")
def python(request: pytest.FixtureRequest) -> warm_python.Run:
    """Runs a command of Python, where torch and Lightning are imported already; with ``--sweeps``, in a new one."""
    return warm_python.run_new if request.config.getoption("sweeps") else warm_python.run
