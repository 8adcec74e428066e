"""Of each file of tests a cluster, so that two workers can run them at once."""

from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster, running_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """The file's."""
    with running_cluster() as running:
        yield running
