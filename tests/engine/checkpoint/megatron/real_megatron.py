"""Megatron-core itself on CPUs and gloo: a small Llama, its optimiser, and its checkpoints.

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

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_models as megatron
from stretto.spec.shape import ModelShape


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


class Run:
    """A model with its optimiser, on all ranks as tensor-parallel ones."""

    def __init__(self, shape: ModelShape) -> None:
        on_cpu()
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.transformer_config import TransformerConfig

        ranks = dist.get_world_size()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        config = TransformerConfig(
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
            tensor_model_parallel_size=ranks,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
            init_method_std=0.2,
        )
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
