import sys
import pathlib

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from ranks import Pool  # noqa: E402


@pytest.fixture(scope="session")
def pool():
    processes = Pool()
    yield processes
    processes.close()
