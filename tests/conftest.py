"""What all tests share."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # synth and the other helper modules beside the tests

# A job in the background of a shell ignores interrupts, one behind nohup hangups, and so would every command that a test stops.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

# A run is the same everywhere: seeded, and without a deadline, which a busy machine would miss.
settings.register_profile(
    "project",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("project")

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-moe-q8_0.gguf"


@pytest.fixture
def example() -> Path:
    """The trained example model of the repository."""
    return EXAMPLE
