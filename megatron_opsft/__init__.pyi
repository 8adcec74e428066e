from megatron_opsft.api import Callback as Callback
from megatron_opsft.api import TrainedRun as TrainedRun
from megatron_opsft.api import convert as convert
from megatron_opsft.api import evaluate as evaluate
from megatron_opsft.api import load_config as load_config
from megatron_opsft.api import train as train

__version__: str
