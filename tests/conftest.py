"""What the tests share: where the measured data lie, and which tests a plain `pytest` leaves out."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# A gate must not depend on luck: in CI hypothesis tries the same examples each time; elsewhere it looks for new ones.
settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")

CHECKOUT = Path(__file__).resolve().parents[1]

# A shell lets what it starts in the background ignore Ctrl-C; the tests, and the commands that they start, heed it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of measured data: FLOWSIM_DATA, else `../shared/data`; the test is skipped without it."""
    folder = Path(os.environ.get("FLOWSIM_DATA") or CHECKOUT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no measured data: {folder} is not a folder; set FLOWSIM_DATA to the one that holds them")
    return folder


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked slow, unless `-m` says what to run."""
    if config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
