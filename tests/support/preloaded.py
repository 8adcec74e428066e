"""What the tests' processes have imported before they begin, as the command line imports it.

vLLM is not among it: it changes the process it lives in.
"""

from pathlib import Path

from megatron_opsft.runtime.libraries import loading_libraries

with loading_libraries():
    import pandas  # noqa: F401
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import megatron_opsft.commands.cli  # noqa: F401
    import megatron_opsft.run.train  # noqa: F401
    from megatron_opsft.config.load import load_config, to_yaml

# The first configuration that is read and written compiles what the others find compiled.
to_yaml(load_config(Path("examples/configs/quickstart.yaml")))
