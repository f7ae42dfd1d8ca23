"""Megatron-core itself on CPUs and gloo: a small Llama, its optimisers, and its checkpoints.

Megatron-core asks for CUDA in a few places; `on_cpu` gives it the CPU there. It writes files in processes,
which here are threads.
"""
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportMissingTypeStubs=false

from __future__ import annotations

import contextlib
import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_models as megatron
from stretto.job.shape import ModelShape


def on_cpu() -> None:
    """Replace what Megatron-core asks of CUDA, in this process."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_, **__: None
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    kind = torch.Tensor.type
    tensor.type = lambda self, *a, **k: (
        kind(self, *a, **k) if a or k else kind(self).replace("torch.", "torch.cuda.")
    )
    module: Any = torch
    for name in ("zeros", "tensor", "empty", "full", "ones"):
        setattr(module, name, _placed(getattr(torch, name)))
    from megatron.core.dist_checkpointing.strategies import filesystem_async as writing
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda self, *_, **__: contextlib.nullcontext()
    results = queue.Queue()
    context = SimpleNamespace(Queue=queue.Queue, JoinableQueue=queue.Queue, Process=threading.Thread)
    writing._get_write_results_queue = lambda: results
    writing._process_memory = lambda: 0
    writing.mp = SimpleNamespace(get_context=lambda _: context, Queue=queue.Queue)


def _placed(make: Any) -> Any:
    def on(*sizes: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return make(*sizes, **options)

    return on


def _config(shape: ModelShape, **ranks: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts: dict[str, Any] = {}
    if shape.moe is not None:
        experts = {"num_moe_experts": shape.moe.experts, "moe_router_topk": shape.moe.top_k}
        experts |= {"moe_token_dispatcher_type": "allgather", "moe_ffn_hidden_size": shape.ffn}
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        ffn_hidden_size=shape.ffn,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        init_method_std=0.2,
        **experts,
        **ranks,
    )


class Run:
    """A model with its optimiser, on all ranks as tensor-parallel ones."""

    def __init__(self, shape: ModelShape) -> None:
        on_cpu()
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        ranks = dist.get_world_size()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        config = _config(shape, tensor_model_parallel_size=ranks)
        torch.manual_seed(7)
        self.shape = shape
        self.model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=shape.vocab,
            max_sequence_length=shape.sequence,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
        self.replica = DistributedDataParallel(config, DistributedDataParallelConfig(), self.model)
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-2, weight_decay=0.1, adam_beta2=0.95, clip_grad=0.0
        )
        self.optimiser = get_megatron_optimizer(settings, [self.replica])
        for group in self.optimiser.param_groups:  # as its scheduler does
            group["weight_decay"] = 0.1 * group["wd_mult"]

    def step(self, tokens: Tensor) -> None:
        """One update on tokens [b, s + 1]."""
        self.replica.zero_grad_buffer()
        self.optimiser.zero_grad()
        self._run(tokens[:, :-1], tokens[:, 1:]).mean().backward()
        self.replica.finish_grad_sync()
        self.optimiser.step()

    def logits(self, tokens: Tensor) -> Tensor:
        """Of this rank's share of the vocabulary."""
        with torch.no_grad():
            return self._run(tokens, None)

    def _run(self, tokens: Tensor, labels: Tensor | None) -> Tensor:
        length = tokens.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        return self.replica(tokens, torch.arange(length)[None], mask, labels=labels)

    def _state(self, *, loading: bool = False) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self.model.sharded_state_dict()}
        return {**state, "optimizer": self.optimiser.sharded_state_dict(state, is_loading=loading)}

    def save(self, folder: Path, step: int) -> None:
        """Write `folder`/iter_..."""
        from megatron.core import dist_checkpointing

        place = folder / f"iter_{step:07d}"
        place.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        args = megatron.arguments(self.shape)
        common = {"args": args, "checkpoint_version": 3.0, "iteration": step}
        dist_checkpointing.save({**common, **self._state()}, str(place), ("torch_dist", 1))

    def load(self, place: Path) -> None:
        """Load an iteration."""
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(self._state(loading=True), str(place))
        self.model.load_state_dict(loaded["model"])
        self.optimiser.load_state_dict(loaded["optimizer"])


class Buffered:
    """A model in bfloat16 under Megatron's distributed optimizer, which trains on random gradients.

    Args:
        tp, pp, chunks, ep: ranks of each kind, and chunks of a pipeline's rank; other ranks are replicas.
        bucket: elements at which a bucket of the first chunk ends.
    """

    def __init__(
        self, shape: ModelShape, *, tp: int, pp: int, chunks: int = 1, ep: int = 1, bucket: int
    ) -> None:
        on_cpu()
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        ranks: dict[str, Any] = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        ranks |= {"expert_model_parallel_size": ep}
        ranks |= {"virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None}
        parallel_state.initialize_model_parallel(**ranks)
        half: dict[str, Any] = dict.fromkeys(("pipeline_dtype", "params_dtype"), torch.bfloat16)
        config = _config(shape, bf16=True, **half, **ranks)
        torch.manual_seed(7)
        self.chunks = list[Any]()
        experts = None if shape.moe is None else shape.moe.experts
        layer = get_gpt_layer_local_spec(experts, normalization="RMSNorm")
        if experts is not None:  # as with Transformer Engine, the norm before a router has its own name
            names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
            layer.submodules.sharded_state_dict_keys_map = names
        for number in range(chunks):
            stage = {"vp_stage": number} if chunks > 1 else {}
            ends = {"ignore_virtual": False, **stage} if chunks > 1 else {}
            model = GPTModel(
                config=config,
                transformer_layer_spec=layer,
                vocab_size=shape.vocab,
                max_sequence_length=shape.sequence,
                share_embeddings_and_output_weights=shape.tied,
                position_embedding_type="rope",
                pre_process=parallel_state.is_pipeline_first_stage(**ends),
                post_process=parallel_state.is_pipeline_last_stage(**ends),
                **stage,
            )
            buckets = DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                overlap_grad_reduce=True,
                grad_reduce_in_fp32=True,
                bucket_size=bucket,
            )
            wrapped = DistributedDataParallel(config, buckets, model.bfloat16(), disable_bucketing=number > 0)
            self.chunks.append(wrapped)
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            adam_beta2=0.95,
            clip_grad=0.0,
            bf16=True,
            use_distributed_optimizer=True,
        )
        self.optimiser = get_megatron_optimizer(settings, self.chunks)
        self.args = megatron.arguments(
            shape,
            bf16=True,
            transformer_impl="local",
            consumed_train_samples=24,
            overlap_grad_reduce=True,
            ddp_bucket_size=bucket,
            **{name: size for name, size in ranks.items() if size is not None},
        )
        if shape.moe is not None:
            self.args.num_experts, self.args.moe_router_topk = shape.moe.experts, shape.moe.top_k

    def step(self, number: int) -> None:
        """One update; the gradients of a parameter are those of its name, the same on all of its replicas."""
        from megatron.core import parallel_state as ranks

        for chunk in self.chunks:
            for name, parameter in chunk.module.named_parameters():
                shared = getattr(parameter, "shared_embedding", False)
                tp = ranks.get_tensor_model_parallel_rank()
                pp = ranks.get_pipeline_model_parallel_rank()
                ep = ranks.get_expert_model_parallel_rank()
                seed = [number, tp if getattr(parameter, "tensor_model_parallel", False) else 0]
                seed += [0 if getattr(parameter, "allreduce", True) else ep]
                text = f"shared {seed}" if shared else f"{name} {seed} {pp}"
                generator = torch.Generator().manual_seed(crc32(text.encode()))
                parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        self.optimiser.step()

    def _state(self, form: str, *, loading: bool = False) -> dict[str, Any]:
        metadata = {"distrib_optim_sharding_type": form, "chained_optim_avoid_prefix": True}
        metadata |= {"singleton_local_shards": False}
        names = ["model"] if len(self.chunks) == 1 else [f"model{i}" for i in range(len(self.chunks))]
        state: dict[str, Any] = {
            name: chunk.module.sharded_state_dict(metadata=metadata)
            for name, chunk in zip(names, self.chunks, strict=True)
        }
        states = self.optimiser.sharded_state_dict(state, is_loading=loading, metadata=metadata)
        return {**state, "optimizer": states, "content_metadata": metadata}

    def save(self, folder: Path, form: str, step: int) -> None:
        """Write `folder`/iter_... with the optimiser's states in a form of Megatron's."""
        from megatron.core import dist_checkpointing

        place = folder / f"iter_{step:07d}"
        place.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        common = {"args": self.args, "checkpoint_version": 3.0, "iteration": step}
        dist_checkpointing.save({**common, **self._state(form)}, str(place), ("torch_dist", 1))

    def load(self, place: Path) -> None:
        """Load an iteration with whole states into a model of one chunk."""
        from megatron.core import dist_checkpointing

        # torch's Adam, unlike Transformer Engine's, has no states to load into before a step, and counts each
        self.step(-1)
        for optimiser in self.optimiser.chained_optimizers:
            optimiser._set_main_param_and_optimizer_states = _with_step(optimiser)
        loaded = dist_checkpointing.load(self._state("fully_reshardable", loading=True), str(place))
        self.chunks[0].module.load_state_dict(loaded["model"])
        self.optimiser.load_state_dict(loaded["optimizer"])


def _with_step(optimiser: Any) -> Any:
    """The optimiser's way to take a parameter's states, which leaves its number of steps as it is."""
    take = optimiser._set_main_param_and_optimizer_states

    def taken(parameter: Any, states: Any) -> None:
        step = optimiser._get_main_param_and_optimizer_states(parameter)["step"].clone()
        take(parameter, {**states, "step": step})

    return taken
