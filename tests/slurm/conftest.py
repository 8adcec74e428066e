"""The one cluster that all tests of this folder share."""

from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster, missing_programs


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    missing = missing_programs()
    assert not missing, f"{missing} are not installed: sudo bash tools/install_slurm.sh"
    with SlurmCluster() as running:
        yield running
