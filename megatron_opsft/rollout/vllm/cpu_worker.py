"""vLLM's CPU worker as this project starts it; imported on a CPU alone, by name (`worker_cls`).

Importing vLLM's CPU worker replaces streams, events and memory functions of `torch.cuda`,
`torch.accelerator` and `torch.Tensor` in the whole process, on any platform: nothing that a GPU
run imports may import this module.
"""

import os

from vllm.v1.worker.cpu_worker import CPUWorker

from megatron_opsft.rollout.vllm.options import JOB_ID_VARIABLE


class LaunchedCpuWorker(CPUWorker):
    """vLLM's worker under a launcher, with shared memory that no other job can have taken.

    The name of that memory comes from the address of the job's store, which vLLM does not know
    under a launcher: every such job on a machine, and what a killed one left, would share it.
    """

    def init_device(self) -> None:
        """The process group is there already, so the address serves as a name only."""
        self.distributed_init_method = f"env://:{os.environ[JOB_ID_VARIABLE]}"
        super().init_device()
