"""What is called on instances, file by file: the source does not say which class they are of.

A call is written as in the source, without its arguments. A new one without a line here fails the
test; so does a line without a call.
"""

from functools import cache

GIVEN = ""  # a function that this one was given, of the project's own
_PACKAGE = "megatron_opsft"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules.forward_backward_"
_DDP = "megatron.core.distributed.DistributedDataParallel"
_GPT = "megatron.core.models.gpt.GPTModel"
# What `get_megatron_optimizer` returns, and the one part of it.
_OPTIMIZER = "megatron.core.optimizer.ChainedOptimizer"
_PART = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
_DCP = "torch.distributed.checkpoint"
_MODULE = "torch.nn.Module"
_LLM = "vllm.LLM"
_ENGINE = "vllm.v1.engine.llm_engine.LLMEngine"
_TENSORS = f"{_PACKAGE}.rollout.vllm.engine_tensors.EngineTensors"
_DRAFT = f"{_PACKAGE}.rollout.vllm.draft_weights.DraftWeights"
_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
_WORKER = "vllm.v1.worker.gpu_worker.Worker"

Targets = str | tuple[str, ...]


INSTANCE_CALLS: dict[str, dict[str, Targets]] = {
    "model/attention.py": {"self.context.rank": "torch.distributed.ProcessGroup.rank"},
    "model/build.py": {
        "chunk.named_parameters": f"{_GPT}.named_parameters",
        "chunk.modules": f"{_GPT}.modules",
        "chunk.to": f"{_GPT}.to",
        "chunk.disable_forward_pre_hook": f"{_DDP}.disable_forward_pre_hook",
    },
    "model/checkpoint.py": {
        "self._models[0].parameters": f"{_GPT}.parameters",
        "self._reference.share": f"{_PACKAGE}.model.reference.ReferenceModel.share",
        "write.finish": f"{_PACKAGE}.model.checkpoint_write.CheckpointWrite.finish",
    },
    "model/checkpoint_read.py": {
        "planner.set_up_planner": f"{_DCP}.DefaultLoadPlanner.set_up_planner",
        "planner.create_local_plan": f"{_DCP}.DefaultLoadPlanner.create_local_plan",
        "reader.set_up_storage_reader": f"{_DCP}.FileSystemReader.set_up_storage_reader",
        "reader.read_data": f"{_DCP}.FileSystemReader.read_data",
        "reader.read_data(LoadPlan(items), planner).wait": "torch.futures.Future.wait",
    },
    "model/checkpoint_share.py": {
        "model.sharded_state_dict": f"{_GPT}.sharded_state_dict",
        "described.build": "megatron.core.dist_checkpointing.mapping.ShardedTensorFactory.build",
        "chunk.start_param_sync": f"{_DDP}.start_param_sync",
    },
    "model/frozen.py": {
        "ModelShards.of(models, WeightTable(shape, names, layout.tp_size), layout).fill": (
            f"{_PACKAGE}.model.shards.ModelShards.fill"
        ),
        "model.eval": f"{_GPT}.eval",
        "self.model": f"{_GPT}.forward",
    },
    "model/hidden_states.py": {
        "model.shared_embedding_or_output_weight": f"{_GPT}.shared_embedding_or_output_weight",
    },
    "model/load.py": {
        "config.method.objective": f"{_PACKAGE}.methods.settings.MethodSettings.objective",
        "table.hf_shapes": f"{_PACKAGE}.weights.rules.WeightTable.hf_shapes",
        "self.shards.fill": f"{_PACKAGE}.model.shards.ModelShards.fill",
        "self.trainer.optimizer.reload_model_params": f"{_OPTIMIZER}.reload_model_params",
    },
    "model/optimizer.py": {
        "optimizer.chained_optimizers[0].state_dict": f"{_PART}.state_dict",
        "part.get_parameters": f"{_PART}.get_parameters",
        "optimizer.step_with_ready_grads": f"{_OPTIMIZER}.step_with_ready_grads",
        "part.init_state_fn": GIVEN,  # Megatron's own closure: (optimizer, config)
        "part.optimizer.state.values": "builtins.dict.values",
        "part.load_state_dict": f"{_PART}.load_state_dict",
    },
    "model/reference.py": {
        "model.parameters": f"{_GPT}.parameters",
        "fused.build": "megatron.core.dist_checkpointing.mapping.ShardedTensorFactory.build",
        "self._trainer.finish_gathering_weights": (
            f"{_PACKAGE}.model.step.Trainer.finish_gathering_weights"
        ),
        "self._trainer.hidden_states": f"{_PACKAGE}.model.step.Trainer.hidden_states",
        "self._trainer.score_batches": f"{_PACKAGE}.model.step.Trainer.score_batches",
    },
    "model/schedule.py": {
        "chunk": f"{_GPT}.forward",
        "chunk.start_param_sync": f"{_DDP}.start_param_sync",
        "get_forward_backward_func()": (
            f"{_SCHEDULES}no_pipelining",
            f"{_SCHEDULES}pipelining_without_interleaving",
            f"{_SCHEDULES}pipelining_with_interleaving",
        ),
    },
    "model/score.py": {
        "chunk.eval": f"{_DDP}.eval",
        "schedule.chunks[0].parameters": f"{_DDP}.parameters",
        "schedule.run": f"{_PACKAGE}.model.schedule.PassSchedule.run",
    },
    "model/step.py": {
        "chunk.train": f"{_DDP}.train",
        "chunk.zero_grad_buffer": f"{_DDP}.zero_grad_buffer",
        "chunk.scale_gradients": f"{_DDP}.scale_gradients",
        "losses.statistics": f"{_PACKAGE}.loss.token_losses.ObjectiveLosses.statistics",
        "self.optimizer.zero_grad": f"{_OPTIMIZER}.zero_grad",
        "self.optimizer.prepare_grads": f"{_OPTIMIZER}.prepare_grads",
        "self.optimizer.get_grad_norm": f"{_OPTIMIZER}.get_grad_norm",
        "self._schedule.run": f"{_PACKAGE}.model.schedule.PassSchedule.run",
        "self._schedule.start_gathering_weights": (
            f"{_PACKAGE}.model.schedule.PassSchedule.start_gathering_weights"
        ),
        "self._schedule.finish_gathering_weights": (
            f"{_PACKAGE}.model.schedule.PassSchedule.finish_gathering_weights"
        ),
    },
    "loss/cross_entropy.py": {
        "losses": f"{_PACKAGE}.loss.token_losses.ObjectiveLosses.__call__",
    },
    "loss/output_head.py": {"self.group.rank": "torch.distributed.ProcessGroup.rank"},
    "rollout/vllm/engine.py": {
        "self._llm.collective_rpc": f"{_LLM}.collective_rpc",
        "self._llm.reset_prefix_cache": f"{_LLM}.reset_prefix_cache",
        "self._llm.get_metrics": f"{_LLM}.get_metrics",
        "self._llm.wake_up": f"{_LLM}.wake_up",
        "self._llm.sleep": f"{_LLM}.sleep",
        "self._llm.llm_engine.add_request": f"{_ENGINE}.add_request",
        "self._llm.llm_engine.step": f"{_ENGINE}.step",
        "self._llm.llm_engine.engine_core.shutdown": (
            "vllm.v1.engine.core_client.InprocClient.shutdown"
        ),
        "self.load_weights": f"{_PACKAGE}.rollout.engine.RolloutEngine.load_weights",
        "self._worker.model_runner.get_model": f"{_RUNNER}.get_model",
        "self._worker.reload_weights": f"{_WORKER}.reload_weights",
        "runner.get_model": f"{_RUNNER}.get_model",
        "runner.get_draft_model": f"{_RUNNER}.get_draft_model",
        "read": (
            "vllm.model_executor.model_loader.weight_utils.safetensors_weights_iterator",
            "vllm.model_executor.model_loader.weight_utils.pt_weights_iterator",
        ),
        "self._draft.fault": f"{_DRAFT}.fault",
        "self._tensors.forget": f"{_TENSORS}.forget",
        "self._tensors.packed": f"{_TENSORS}.packed",
        "self.layout.parameters_of": GIVEN,
        "take": GIVEN,
    },
    "rollout/vllm/options.py": {
        "error.errors": "pydantic.ValidationError.errors",
        "llm.model_config.get_vocab_size": "vllm.config.ModelConfig.get_vocab_size",
    },
    "rollout/vllm/engine_tensors.py": {
        "model.named_modules": f"{_MODULE}.named_modules",
        "model.named_parameters": f"{_MODULE}.named_parameters",
        "self._model.get_parameter": f"{_MODULE}.get_parameter",
        # Of vLLM's layers on a CPU alone.
        "module.cpu_linear": GIVEN,
        "product": GIVEN,
    },
    "rollout/vllm/draft_weights.py": {
        "self._policy.modules": f"{_MODULE}.modules",
        "self._draft.named_modules": f"{_MODULE}.named_modules",
        "self._draft.named_buffers": f"{_MODULE}.named_buffers",
        "self._tensors.forget": f"{_TENSORS}.forget",
    },
    "runtime/context.py": {
        "_SumOverContext.apply": "torch.autograd.Function.apply",
        "_SumOverContext.forward": f"{_PACKAGE}.runtime.context._SumOverContext.forward",
    },
    "runtime/distributed.py": {"work": GIVEN, "group.rank": "torch.distributed.ProcessGroup.rank"},
    "sync/export.py": {"self._layout.cut": f"{_PACKAGE}.runtime.distributed.Layout.cut"},
    "model/shards.py": {
        "cls": f"{_PACKAGE}.model.shards.ModelShards",
        "layout.own_experts": f"{_PACKAGE}.runtime.distributed.Layout.own_experts",
        "self.layout.cut": f"{_PACKAGE}.runtime.distributed.Layout.cut",
        "model.named_parameters": f"{_GPT}.named_parameters",
        "self.table.hf_shapes": f"{_PACKAGE}.weights.rules.WeightTable.hf_shapes",
        "table.check_mcore_names": f"{_PACKAGE}.weights.rules.WeightTable.check_mcore_names",
        "table.stage_rules": f"{_PACKAGE}.weights.rules.WeightTable.stage_rules",
    },
}

# Files of the GPU path that name none of the packages and yet hold their instances.
HOLDERS = (
    "model/hidden_states.py",
    "model/load.py",
    "rollout/vllm/engine.py",
    "rollout/vllm/engine_tensors.py",
)
CPU_ONLY = (
    "runtime/cpu_compat.py",
    "rollout/vllm/cpu_kernels.py",
    "rollout/vllm/cpu_worker.py",
)

# What is read from the instances that the packages hand out.
ATTRIBUTES = {
    "vllm.outputs.RequestOutput": (
        ["finished", "request_id", "outputs", "prompt_logprobs", "num_cached_tokens"]
    ),
    "vllm.outputs.CompletionOutput": ["token_ids"],
    "vllm.logprobs.Logprob": ["logprob"],
    "vllm.v1.metrics.reader.Counter": ["name", "value"],
    "vllm.v1.engine.core_client.InprocClient": ["engine_core"],
    "vllm.v1.engine.core.EngineCore": ["scheduler"],
    "vllm.v1.core.sched.scheduler.Scheduler": ["dynamic_sd_lookup"],
    "megatron.core.transformer.TransformerConfig": (
        ["finalize_model_grads_func", "no_sync_func", "gradient_accumulation_fusion", "bf16"]
    ),
    "megatron.core.distributed.DistributedDataParallelConfig": ["overlap_param_gather"],
}


@cache
def plain_methods() -> frozenset[str]:
    """Method names of Python's own objects and of tensors, on which calls are not bound."""
    import io
    import logging
    import pathlib
    import queue
    import socket
    import threading

    import torch

    kinds = (str, bytes, dict, list, set, frozenset, tuple, int, float, io.BytesIO, torch.Tensor)
    others = (pathlib.Path, threading.Thread, queue.Queue, socket.socket, logging.Logger)
    return frozenset(n for kind in (*kinds, *others) for n in dir(kind) if not n.startswith("_"))


def targets(listed: Targets) -> tuple[str, ...]:
    """Dotted names of what an instance call may reach; none for `GIVEN`."""
    return (listed,) if isinstance(listed, str) and listed else tuple(listed)
