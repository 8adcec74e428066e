from megatron_opsft.callback import Callback as Callback
from megatron_opsft.commands.api import TrainedRun as TrainedRun
from megatron_opsft.commands.api import convert as convert
from megatron_opsft.commands.api import evaluate as evaluate
from megatron_opsft.commands.api import load_config as load_config
from megatron_opsft.commands.api import train as train

__version__: str
