"""A rank's place in its job, from the environment of one launcher or another."""

import pytest

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.launcher import RENDEZVOUS, is_launched, usual_variables

MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
OPEN_MPI = {"RANK": "9", "SIZE": "16", "LOCAL_RANK": "1", "LOCAL_SIZE": "8"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in OPEN_MPI.items()}
HYDRA = {"PMI_RANK": "9", "PMI_SIZE": "16", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "8"}
SRUN = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}
PLACE = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}


def test_other_launchers_names_become_the_usual_ones() -> None:
    for theirs in (OPEN_MPI, HYDRA, SRUN | {"SLURM_NTASKS_PER_NODE": "8"}):
        assert usual_variables(MASTER | theirs) == PLACE
    assert usual_variables(MASTER | SRUN) == {
        name: PLACE[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }


def test_what_is_set_stays_and_a_single_process_stays_one() -> None:
    assert usual_variables(MASTER | OPEN_MPI | {"RANK": "0"}) == {}
    assert usual_variables(SRUN) == {}  # a shell of salloc, a script of sbatch


def test_a_variable_that_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RENDEZVOUS:
        monkeypatch.delenv(name, raising=False)
    assert not is_launched()
    monkeypatch.setenv("MASTER_ADDR", "node0")
    assert not is_launched()
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match="has not set WORLD_SIZE, MASTER_PORT"):
        is_launched()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert is_launched()
