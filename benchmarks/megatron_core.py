"""Claim: pipelines beat Megatron-core's schedules by 5%, and tensor parallelism is no slower than its layers.

Runs on the CPU with gloo, with megatron-core installed. Megatron-core assumes CUDA in a few places;
`without_cuda` replaces these calls with CPU stand-ins and lists them. The model has the same sizes and its
own initial values.

    python benchmarks/megatron_core.py
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from harness import Step, Timing, arguments, on_ranks, race, report
from small_gpt import (
    HEADS,
    HIDDEN,
    LAYERS,
    MICROBATCHES,
    SAMPLES,
    SEQUENCE,
    SHAPE,
    VOCAB,
    adamw,
    batch,
    config,
    only_rank,
    plain,
    replica,
    single_step,
    stretto_step,
    with_blas,
)

from stretto.job.flops import layer_costs
from stretto.layout.cut import cut


def without_cuda() -> list[str]:
    """Stand-ins for the calls that need a GPU; returns their names."""
    cpu = torch.device("cpu")
    zeros = torch.zeros

    def zeros_on_cpu(*size: Any, **options: Any) -> torch.Tensor:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = cpu
        return zeros(*size, **options)

    stand_ins = {
        "torch.cuda.current_device": (torch.cuda, "current_device", lambda: cpu),
        "torch.cuda.synchronize": (torch.cuda, "synchronize", lambda *_: None),
        "torch.cuda.set_device": (torch.cuda, "set_device", lambda *_: None),
        "torch.cuda.is_current_stream_capturing": (torch.cuda, "is_current_stream_capturing", lambda: False),
        "torch.Tensor.cuda": (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        "torch.zeros": (torch, "zeros", zeros_on_cpu),
    }
    for owner, name, stand_in in stand_ins.values():
        setattr(owner, name, stand_in)
    from megatron.core.tensor_parallel import random  # pyright: ignore
    from megatron.core.transformer.torch_norm import WrappedTorchNorm  # pyright: ignore

    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    # refuses sequence parallelism, since only the norms of its CUDA libraries mark their parameters for it
    WrappedTorchNorm.__new__ = lambda _, config, hidden_size, eps=1e-5, **__: _marked(
        torch.nn.LayerNorm(hidden_size, eps), config.sequence_parallel
    )
    return [*stand_ins, "CudaRNGStatesTracker.fork", "WrappedTorchNorm"]


def _marked(norm: torch.nn.Module, sequence_parallel: bool) -> torch.nn.Module:
    for parameter in norm.parameters():
        setattr(parameter, "sequence_parallel", sequence_parallel)  # noqa: B010
    return norm


def megatron(tp: int, pp: int, chunks: int, sequence_parallel: bool = False) -> Step:
    """Megatron-core's GPT and its schedule, with Stretto's cut where it allows one."""
    from megatron.core import parallel_state  # pyright: ignore
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # pyright: ignore
    from megatron.core.models.gpt.gpt_model import GPTModel  # pyright: ignore
    from megatron.core.pipeline_parallel import get_forward_backward_func  # pyright: ignore
    from megatron.core.transformer.transformer_config import TransformerConfig  # pyright: ignore

    virtual = chunks if chunks > 1 else None
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual,
    )
    first = None
    if pp > 1 and chunks == 1:  # like Stretto's cut; Megatron-core does not count the embedding as a layer
        first = len(cut(layer_costs(SHAPE, SEQUENCE), pp)[0]) - 1
    settings = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual,
        sequence_parallel=sequence_parallel,
        num_layers_in_first_pipeline_stage=first,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    parts = []
    for chunk in range(chunks):
        stage = {"vp_stage": chunk} if virtual else {}
        ends = {"ignore_virtual": False, **stage} if virtual else {}
        parts.append(
            GPTModel(
                config=settings,
                transformer_layer_spec=get_gpt_layer_local_spec(),
                vocab_size=VOCAB,
                max_sequence_length=SEQUENCE,
                pre_process=parallel_state.is_pipeline_first_stage(**ends),
                post_process=parallel_state.is_pipeline_last_stage(**ends),
                share_embeddings_and_output_weights=False,
                **stage,
            )
        )
    run = get_forward_backward_func()
    optimizer = adamw(p for part in parts for p in part.parameters())
    split = [p for part in parts for p in part.parameters() if getattr(p, "sequence_parallel", False)]
    inputs, targets = batch()
    position = torch.arange(SEQUENCE).unsqueeze(0)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)

    def forward(data: Any, part: Any) -> Any:
        x, y = next(data)
        return part(x, position, mask, labels=y), lambda losses: (losses.float().mean(), {})

    def step() -> None:
        feeds = [iter(list(zip(inputs, targets, strict=True))) for _ in parts]
        run(
            forward_step_func=forward,
            data_iterator=feeds if virtual else feeds[0],
            model=parts if virtual else parts[0],
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=SAMPLES,
            forward_only=False,
        )
        add_up(split)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def add_up(parameters: list[torch.Tensor]) -> None:
    """Sum gradients of what is computed on parts of the sequence, as Megatron-core's finalize_model_grads has
    it, which wants its wrapper for data parallelism.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def compete(tp: int, pp: int, chunks: int, rounds: int) -> list[Timing]:
    overrides: dict[str, Any] = {"layout__tp": tp, "layout__pp": pp}
    overrides |= {"schedule__name": "interleaved", "schedule__chunks": chunks} if chunks > 1 else {}
    contestants = {
        "one process": only_rank(0, single_step(plain()), dist.get_rank()),
        "Stretto": stretto_step(replica(config(**overrides))),
        "Stretto, BLAS products": with_blas(stretto_step(replica(config(**overrides)))),
    }
    replaced = without_cuda()
    contestants["Megatron-core"] = megatron(tp, pp, chunks)
    if dist.get_rank() == 0:
        print("CPU stand-ins:", ", ".join(replaced), flush=True)
    return race(contestants, "Megatron-core", rounds=rounds)


def main() -> None:
    args = arguments(__doc__, rounds=12)
    for title, tp, pp, chunks in (
        ("2 pipeline ranks, 1f1b, against Megatron-core", 1, 2, 1),
        ("2 pipeline ranks, interleaved, against Megatron-core", 1, 2, 2),
        ("2 tensor-parallel ranks, against Megatron-core", 2, 1, 1),
    ):
        timings = on_ranks(2, compete, tp, pp, chunks, args.rounds)[0]
        report(title, timings, "Megatron-core", args.out)


if __name__ == "__main__":
    main()
