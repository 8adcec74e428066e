"""The directory of an evaluation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_opsft.errors import UserError
from megatron_opsft.runtime.owned_directory import OwnedDirectory


class EvaluationDirectory(OwnedDirectory):
    """Its manifest's `starts` say what each start of the evaluation did."""

    kind = "evaluation"
    names = ("samples", "results.json", "table.md", "report.html")

    def open(self, identity: Mapping[str, Any], *, overwrite: bool) -> None:
        """Make it ready for this evaluation; samples that it holds must be of the same one.

        identity: whatever decides a sample, JSON; below `data` one entry per benchmark, of which
        others may come and stay away. Errors: `UserError` naming what differs.
        """
        self.check()
        if overwrite:
            self.clear()
        self.check_same(identity, growing="data")

    def remember(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest. What it reported before stays in it: starts, and the data of
        benchmarks that this command leaves out, whose samples are still in the directory.
        """
        before = self.read_manifest() or {}
        data = before.get("identity", {}).get("data", {}) | manifest["identity"]["data"]
        identity = manifest["identity"] | {"data": data}
        starts = before.get("starts", [])
        self.write_manifest({**manifest, "identity": identity, "starts": starts})

    def note_start(self, start: Mapping[str, Any]) -> None:
        """Add what one start did: how many samples, how fast, on how many ranks."""
        manifest = read_manifest(self.path)
        self.write_manifest(manifest | {"starts": [*manifest["starts"], dict(start)]})


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of an evaluation. Errors: `UserError` where there is none."""
    evaluation = EvaluationDirectory(directory)
    if (found := evaluation.read_manifest()) is None:
        raise UserError(f"{directory / evaluation.manifest} cannot be read: there is no such file")
    return found
