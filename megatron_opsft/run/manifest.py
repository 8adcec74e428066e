"""manifest.json: what a run is made of."""

from typing import Any

from megatron_opsft.config.identity import config_hash
from megatron_opsft.runtime.libraries import installed_versions
from megatron_opsft.session import Session


def manifest_of(session: Session) -> dict[str, Any]:
    """`identity` is what a resumed run must keep besides the keys of its configuration."""
    return {
        "versions": installed_versions(),
        "config_hash": config_hash(session.config),
        "data": session.problems.name,
        "identity": {
            "data_sha256": session.problems.sha256,
            "example_prompt": session.sampler.encoder.example,
        },
        "num_problems": len(session.problems.problems),
        "num_bad_rows": len(session.problems.bad_rows),
        "model": str(session.config.model.path),
        "world_size": session.layout.world_size,
    }
