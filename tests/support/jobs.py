"""What the workers run: called on every rank, inside a process group of the job's size."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from responses import rollout_of
from te_cross_entropy import install_stand_in
from tiny_models import SHAPES, adapter_values, samples, weights

from megatron_opsft.config import LoraConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megatron_opsft.methods.objective import LIKELIHOOD, Aggregation, Objective, aggregate
from megatron_opsft.models.weights.filling import merge_shards
from megatron_opsft.models.weights.lora import adapters_of_rules
from megatron_opsft.models.weights.rules import WeightRule, WeightTable
from megatron_opsft.models.weights.slicing import shard_parameter
from megatron_opsft.records import (
    MicroBatch,
    Outcome,
    Problem,
    Rollout,
    Sample,
    StepResult,
    TokenUse,
    Verdict,
)
from megatron_opsft.run.sync.export import Exporter
from megatron_opsft.runtime.device import Device, select_device
from megatron_opsft.runtime.distributed import Layout, gather_from_all, start_distributed
from megatron_opsft.trainer.batching.exchange import fetch_samples, share_facts
from megatron_opsft.trainer.batching.microbatch import pack, plan_packs
from megatron_opsft.trainer.loss.cross_entropy import CrossEntropyKind
from megatron_opsft.trainer.model.build import build_model, wrap_for_training
from megatron_opsft.trainer.model.lora import adapters_of, add_adapters
from megatron_opsft.trainer.model.optimizer import build_optimizer
from megatron_opsft.trainer.model.passes import packed_params
from megatron_opsft.trainer.model.shards import ModelShards
from megatron_opsft.trainer.model.step import Trainer
from megatron_opsft.trainer.model.transformer_config import (
    transformer_config,
    uses_transformer_engine,
)

NUM_ROLLOUTS = 32
# Of the samples in order, where an objective asks for them.
ADVANTAGES = (0.5, -1.5, 2.0, 0.0, -0.75, 1.25, -0.25, -2.0, 0.9, 1.7, -1.1, 0.4, -0.6)
# Clipping is always at work. A larger epsilon keeps entries without gradient from being noise.
OPTIMIZER = OptimizerConfig(lr=1e-3, clip_grad=0.05, weight_decay=0.1, eps=1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to train one model of `SHAPES`."""

    model: str = "qwen2"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int | None = None
    sequence_parallel: bool = False
    overlap: bool = True
    budget: int = 160
    num_samples: int = 13
    aggregation: Aggregation = "max_accepted"
    recompute: str = "none"
    cross_entropy: CrossEntropyKind = "fused_linear"
    objective: Objective = LIKELIHOOD
    dtype: str = "float32"
    device_name: str = "cpu"
    deterministic: bool = False
    lora: LoraConfig = LoraConfig()
    # Whether every token goes to experts that were drawn for it.
    replays: bool = False
    # The rank that sampled each response; by default they are dealt out unevenly.
    all_on_rank: int | None = None

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def device(self) -> Device:
        return select_device(self.device_name)

    @property
    def parallel(self) -> ParallelConfig:
        names = ("tp", "pp", "cp", "ep", "etp", "vpp", "sequence_parallel")
        layout = {name: getattr(self, name) for name in names}
        return ParallelConfig(**layout, overlap_grad_reduce=self.overlap)

    def __str__(self) -> str:
        """What is not as usual."""
        values = [(field, getattr(self, field.name)) for field in fields(self)]
        return " ".join(f"{f.name}={v}" for f, v in values if v != f.default) or "one rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A trainer on this rank, as `model.load.build_trainer` makes it from files."""

    trainer: Trainer
    shards: ModelShards
    layout: Layout
    lora: LoraConfig = LoraConfig()


def build(case: Case) -> Built:
    """Join the groups of the case and build its model with the weights of `tiny_models`."""
    layout = start_distributed(case.device, case.parallel)
    if case.cross_entropy == "te" and not case.device.is_cuda:
        install_stand_in()
    shape = SHAPES[case.model]
    train = {"recompute": case.recompute, "routing_replay": case.replays}
    config = transformer_config(
        shape,
        dtype=case.dtype,
        parallel=case.parallel,
        train=TrainConfig.model_validate(train),
        device=case.device,
        deterministic=case.deterministic,
    )
    names = "te" if uses_transformer_engine(case.device, case.dtype) else "local"
    table = WeightTable(shape, names, case.tp)
    models = build_model(shape, config, case.device)
    values = weights(case.model)
    ModelShards.of(models, table, layout).fill(lambda rect: rect.view(values[rect.tensor]))
    if case.lora.rank:
        add_adapters(models, table, layout, case.lora, seed=0)
        values |= adapter_values(case.model, case.lora)
        for adapter in adapters_of(models):
            adapter.fill(lambda rect: rect.view(values[rect.tensor]))
    chunks = wrap_for_training(models, config, case.parallel)
    trainer = Trainer(
        chunks=chunks,
        optimizer=build_optimizer(chunks, OPTIMIZER, bf16=config.bf16),
        config=config,
        layout=layout,
        vocab_size=shape.vocab_size,
        cross_entropy=case.cross_entropy,
        objective=case.objective,
    )
    shards = ModelShards.of(models, table, layout)
    return Built(trainer=trainer, shards=shards, layout=layout, lora=case.lora)


def sampled_here(case: Case, layout: Layout, accepted: list[Sample]) -> list[Sample]:
    """This rank's accepted responses before the exchange: few on rank 0, most on the last one."""
    if case.all_on_rank is not None:
        return accepted if layout.rank == case.all_on_rank else []
    size = layout.world_size
    owner = [min(int(size * (n / len(accepted)) ** 0.5), size - 1) for n in range(len(accepted))]
    return [s for s, rank in zip(accepted, owner, strict=True) if rank == layout.rank]


def _drawn_routing(case: Case, sample: Sample) -> bytes:
    """Experts of each token but the last in each layer; they depend on the sample alone."""
    shape = SHAPES[case.model]
    if not case.replays or shape.moe is None:
        return b""
    draw = random.Random(repr(sample))
    num_places = (len(sample.prompt_ids) + len(sample.response_ids) - 1) * shape.num_layers
    experts = range(shape.moe.num_experts)
    return b"".join(bytes(draw.sample(experts, shape.moe.top_k)) for _ in range(num_places))


def finished(sample: Sample, routing: bytes = b"") -> Rollout:
    """As an engine gives it back."""
    given = {name: getattr(sample, name) for name in ("problem_id", "sample_index", "prompt_ids")}
    return rollout_of("", sample.response_ids, routing=routing, **given)


def batches_of(case: Case, layout: Layout, seed: int = 0) -> tuple[list[MicroBatch], float]:
    """Exchange, order, weigh, pack: the steps of the training loop."""
    mine = sampled_here(case, layout, samples(case.num_samples, seed=seed))
    problems = [Problem(id=f"p{n}", text="", answer="") for n in range(case.num_samples)]
    rollouts = [finished(sample, _drawn_routing(case, sample)) for sample in mine]
    correct = [Verdict(outcome=Outcome.CORRECT)] * len(mine)
    accepted = share_facts(rollouts, correct, [TokenUse()] * len(mine), problems)
    if not accepted:
        return [], 0.0
    lengths = [response.num_tokens for response in accepted]
    is_accepted = [n < len(lengths) for n in range(NUM_ROLLOUTS)]
    all_lengths = lengths + [1] * (NUM_ROLLOUTS - len(lengths))
    token_weights, factor = aggregate(case.aggregation, all_lengths, is_accepted, limit=0)
    plain = case.objective.is_weighted_likelihood
    device = case.device.torch_device
    shape = SHAPES[case.model]
    width = shape.num_layers * shape.moe.top_k if case.replays and shape.moe else 0
    plan, _ = plan_packs(
        [response.sequence_tokens for response in accepted],
        case.parallel,
        budget=case.budget,
        dp_size=layout.dp_size,
    )
    indices_of = [list(chain.from_iterable(packs)) for packs in plan]
    batches = pack(
        plan[layout.dp_rank],
        fetch_samples(
            accepted, indices_of, rollouts, problems, layout, device, routing_width=width
        ),
        token_weights[: len(accepted)],
        case.parallel,
        cp_rank=layout.cp_rank,
        advantages=None if plain else ADVANTAGES[: len(accepted)],
        device=device,
    )
    return batches, factor


def gradient(case: Case) -> Any:
    """`Trainer.accumulate`; (loss, number of micro-batches, {hf_name: gradient of all ranks})."""
    built = build(case)
    batches, factor = batches_of(case, built.layout)
    counts = gather_from_all([len(batches)])
    assert len(set(counts)) == 1, f"ranks have different numbers of micro-batches: {counts}"
    loss = built.trainer.accumulate(batches, factor).loss
    collect_reduced_parts(built.trainer)
    return loss, len(batches), whole_gradient(built)


Logits = list[tuple[list[int], list[int], Any]]  # tokens, cu_seqlens, logits of each micro-batch


def logits(case: Case, checkpoint: Path | None = None) -> Logits:
    """A forward pass, with weights that Megatron alone has read where there is a checkpoint; empty
    on ranks other than the first of the last pipeline stage.
    """
    built = build(case)
    if checkpoint is not None:
        load_with_megatron(built.trainer.models, checkpoint)
    batches, _ = batches_of(case, built.layout)
    found = forward_logits(built.trainer.chunks, batches, SHAPES[case.model].vocab_size)
    return found if built.layout.is_loss_rank else []


def load_with_megatron(models: list[Any], directory: Path) -> None:
    """Megatron-Core's own way, with nothing of this project: `dist_checkpointing.load`."""
    keys = ["model"] if len(models) == 1 else [f"model{n}" for n in range(len(models))]
    for model in models:
        for parameter in model.parameters():
            parameter.data.fill_(7.0)
    state = {key: m.sharded_state_dict() for key, m in zip(keys, models, strict=True)}
    loaded = dist_checkpointing.load(state, str(directory))
    for key, model in zip(keys, models, strict=True):
        model.load_state_dict(loaded[key], strict=True)


@torch.no_grad()  # a layer of experts would keep the graph, and the graph keeps the model
def forward_logits(models: list[Any], batches: list[MicroBatch], vocab_size: int) -> Logits:
    """A forward pass of Megatron's schedule through this rank's model chunks."""

    def forward(own: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(own)
        inputs = batch.tokens_T[None], batch.positions_T[None], None  # no attention mask
        return model(*inputs, packed_seq_params=packed_params(batch)), partial(collect, batch)

    def collect(batch: MicroBatch, logits_1TV: torch.Tensor, non_loss_data: bool) -> Any:
        whole_TV = gather_from_tensor_model_parallel_region(logits_1TV)[0, :, :vocab_size]
        return batch.tokens_T.tolist(), batch.cu_seqlens.tolist(), whole_TV.float().cpu().numpy()

    for model in models:
        model.eval()
    interleaved = len(models) > 1
    found = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(batches) for _ in models] if interleaved else iter(batches),
        model=models if interleaved else models[0],
        num_microbatches=len(batches),
        seq_length=max(batch.num_tokens for batch in batches),
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    assert isinstance(found, list)
    return found


def collect_reduced_parts(trainer: Trainer) -> None:
    """Complete the gradient buffers: the reduce-scatter left each rank the sum of its own part."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group()
    for chunk in trainer.chunks:
        buffers = [(buffer, group) for buffer in chunk.buffers]
        for buffer, holders in buffers + [(b, experts) for b in chunk.expert_parallel_buffers]:
            for bucket in buffer.buckets:
                part = bucket.grad_data.chunk(holders.size())[holders.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, part, group=holders)


def whole_gradient(built: Built) -> dict[str, Any]:
    """HF name -> gradient of what is trained, on rank 0; checks what all copies of a parameter must
    agree on.
    """
    layout, shards = built.layout, built.shards
    parameters = [p for model in built.trainer.models for p in model.parameters()]
    trained = [p for p in parameters if p.requires_grad]
    by_storage = {p.data_ptr(): p.main_grad.cpu().numpy() for p in trained}
    rules: Sequence[WeightRule] = shards.table.rules
    held = list(shards.parameters)
    if shards.adapters:
        rules = adapters_of_rules(shards.table.exported, built.lora)
        held = list(chain.from_iterable(a.factors() for a in shards.adapters.values()))
        assert len(trained) == len(held)
    mine = {rule.mcore_name: by_storage[p.data_ptr()] for rule, p in held}
    found = gather_from_all([(layout, mine)])
    if not layout.is_main:
        return {}
    whole: dict[str, torch.Tensor] = {}
    for rule in rules:
        tp_size = layout.shard(is_expert=rule.is_expert).tp_size
        copies = [
            (place, place.shard(is_expert=rule.is_expert), torch.from_numpy(grads[rule.mcore_name]))
            for place, grads in found
            if rule.mcore_name in grads
        ]
        if rule.replica and not copies:
            continue  # tied, and embedding and head share a stage
        stage = min(place.pp_rank for place, _, _ in copies)
        firsts = {
            shard.tp_rank: copy
            for place, shard, copy in copies
            if place.pp_rank == stage and shard.copy_rank == 0
        }
        parts = [firsts[rank] for rank in range(tp_size)]
        for _, shard, copy in copies:
            torch.testing.assert_close(copy, parts[shard.tp_rank], rtol=0, atol=0)
        for tp_rank, part in enumerate(parts):
            assert not part[shard_parameter(rule, tp_rank, tp_size).padding_row :].any()
        if rule.kind.value == "copy":
            for part in parts[1:]:
                torch.testing.assert_close(part, parts[0], rtol=0, atol=0)
        for name, value in merge_shards(rule, parts).items():
            if rule.replica:  # the head's copy of a tied embedding: already summed into the first
                torch.testing.assert_close(value, whole[name], rtol=0, atol=0)
            whole[name] = value
    return {name: value.numpy() for name, value in whole.items()}


def train_steps(built: Built, case: Case, steps: range) -> list[StepResult]:
    """`Trainer.step` on other samples each time; checks that the results are equal on all ranks."""
    results = []
    for step in steps:
        batches, factor = batches_of(case, built.layout, seed=step)
        result = built.trainer.step(batches, factor, lr=OPTIMIZER.lr)
        assert set(gather_from_all([result])) == {result}
        results.append(result)
    return results


def run_training(config_file: str, overrides: list[str]) -> int:
    """`megatron-opsft train` inside the job's process group; its exit code."""
    # Here: what only trains does not need the packages of rollout engines and verifier.
    from megatron_opsft.config.load import load_config
    from megatron_opsft.run.start.check import check_on_job
    from megatron_opsft.run.train import train

    return train(check_on_job(load_config(Path(config_file), overrides)))


def exported(built: Built) -> dict[str, torch.Tensor]:
    """The whole model under its HF names, on every rank."""
    shards = built.shards
    exporter = Exporter(shards.table.exported, shards.policy_weights, shards.layout)
    return {name: t.clone() for name, t in exporter.stream()}


def as_arrays(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """For the way back to the test; bfloat16 becomes float32, which holds it exactly."""
    return {name: tensor.float().cpu().numpy() for name, tensor in tensors.items()}


def merged_export(case: Case) -> dict[str, Any]:
    """What a weight sync streams, by HF name; the trainer's own weights stay as they were."""
    built = build(case)
    before = [tensor.clone() for _, tensor in built.shards.parameters]
    streamed = as_arrays(exported(built))
    for (rule, tensor), old in zip(built.shards.parameters, before, strict=True):
        assert torch.equal(tensor, old), rule.mcore_name
    return streamed
