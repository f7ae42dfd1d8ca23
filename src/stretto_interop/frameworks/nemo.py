"""NeMo's Megatron-Bridge: overrides of a recipe, from Megatron-LM's arguments.

Both run Megatron-Core, so the rules are Megatron-LM's, and each of its arguments is one field or several of
Megatron-Bridge v0.3.1 (2026-03-20), which is built on Megatron-LM core_v0.16.1: `ConfigContainer` in
src/megatron/bridge/training/config.py. What a recipe's model decides by itself, such as the kind of its
activation, has no override and is left to the recipe, with a note.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stretto.job.framework import framework_behaviour
from stretto.job.job import Job
from stretto_interop.frameworks.fields import JOB, RATE, RUN, JobValues, name_of
from stretto_interop.frameworks.mapping import Rule, Settings, Unset, refused, require
from stretto_interop.frameworks.megatron.framework import MEGATRON, as_run

VERSION = "v0.3.1"
_NODE = 8  # devices of a node, unless GPUS_PER_NODE says otherwise

# fields that have another name than the argument, or stand in another section than the model's
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "num-experts": ("model.num_moe_experts",),
    "norm-epsilon": ("model.layernorm_epsilon",),
    "seq-length": ("model.seq_length", "dataset.sequence_length"),
    "vocab-size": ("model.vocab_size",),
    "microbatch-group-size-per-virtual-pipeline-stage": ("model.microbatch_group_size_per_vp_stage",),
    "num-virtual-stages-per-pipeline-rank": ("model.virtual_pipeline_model_parallel_size",),
    "swiglu": ("model.gated_linear_unit",),
    "apply-layernorm-1p": ("model.layernorm_zero_centered_gamma",),
    "use-rope-scaling": ("model.rope_scaling",),
    "use-tp-pp-dp-mapping": ("dist.use_tp_pp_dp_mapping",),
    "distributed-timeout-minutes": ("dist.distributed_timeout_minutes",),
    "ddp-bucket-size": ("ddp.bucket_size",),
    "use-distributed-optimizer": ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
    "use-megatron-fsdp": ("ddp.use_megatron_fsdp", "dist.use_megatron_fsdp"),
    "optimizer-cpu-offload": ("optimizer.optimizer_cpu_offload",),
    "use-precision-aware-optimizer": ("optimizer.use_precision_aware_optimizer",),
    "initial-loss-scale": ("optimizer.initial_loss_scale",),
    "loss-scale-window": ("optimizer.loss_scale_window",),
    "hysteresis": ("optimizer.hysteresis",),
    "log-interval": ("logger.log_interval",),
    "tensorboard-dir": ("logger.tensorboard_dir",),
    "wandb-project": ("logger.wandb_project",),
    "wandb-exp-name": ("logger.wandb_exp_name",),
    "seed": ("rng.seed", "dataset.random_seed"),
    "split": ("dataset.split",),
    "reset-position-ids": ("dataset.reset_position_ids",),
    "reset-attention-mask": ("dataset.reset_attention_mask",),
    "eod-mask-loss": ("dataset.eod_mask_loss",),
    "data-path": ("dataset.blend",),
    "tokenizer-model": ("tokenizer.tokenizer_model",),
    "tokenizer-type": ("tokenizer.tokenizer_type",),
    "vocab-file": ("tokenizer.vocab_file",),
    "merge-file": ("tokenizer.merge_file",),
    "data-cache-path": ("dataset.path_to_cache",),
}
_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "ddp": (
        "overlap-grad-reduce",
        "overlap-param-gather",
        "data-parallel-sharding-strategy",
        "num-distributed-optimizer-instances",
    ),
    "optimizer": (
        "optimizer",
        "lr",
        "min-lr",
        "weight-decay",
        "clip-grad",
        "adam-beta1",
        "adam-beta2",
        "adam-eps",
        "sgd-momentum",
        "muon-momentum",
    ),
    "scheduler": (
        "lr-decay-style",
        "lr-decay-iters",
        "lr-warmup-iters",
        "lr-warmup-fraction",
        "lr-warmup-init",
        "lr-wsd-decay-style",
        "lr-wsd-decay-iters",
    ),
    "train": (
        "micro-batch-size",
        "global-batch-size",
        "train-iters",
        "eval-iters",
        "eval-interval",
        "check-weight-hash-across-dp-replicas-interval",
    ),
    "checkpoint": ("save", "load", "save-interval", "async-save", "ckpt-format"),
}
_SECTION_OF = {name: section for section, names in _SECTIONS.items() for name in names}
# arguments that say no in Megatron-LM, and the field that says yes
_DENIED = {
    "untie-embeddings-and-output-weights": "model.share_embeddings_and_output_weights",
    "disable-bias-linear": "model.add_bias_linear",
}
# what the section mixed_precision, or a field beside, says already
_IMPLIED = ("accumulate-allreduce-grads-in-fp32", "group-query-attention", "fp8-recipe", "world-size")
_LISTED = ("cp-comm-type", "moe-router-load-balancing-type", "moe-aux-loss-coeff")
_BY_RECIPE = ("squared-relu", "multi-latent-attention", "max-position-embeddings")
# what a recipe may have switched on, and what the arguments mean where they say nothing
_OFF: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            "model.sequence_parallel",
            "model.gated_linear_unit",
            "model.distribute_saved_activations",
            "model.qk_layernorm",
            "model.add_qkv_bias",
            "ddp.overlap_grad_reduce",
            "ddp.overlap_param_gather",
            "ddp.use_distributed_optimizer",
            "ddp.use_megatron_fsdp",
            "dist.use_megatron_fsdp",
            "optimizer.use_distributed_optimizer",
            "optimizer.optimizer_cpu_offload",
            "dataset.reset_position_ids",
            "dataset.reset_attention_mask",
            "dataset.eod_mask_loss",
        ),
        False,
    ),
    **dict.fromkeys(
        (
            "model.virtual_pipeline_model_parallel_size",
            "model.pipeline_model_parallel_layout",
            "model.microbatch_group_size_per_vp_stage",
            "model.recompute_granularity",
            "model.recompute_method",
            "model.recompute_num_layers",
            "model.num_moe_experts",
        ),
        None,
    ),
}


def overrides(settings: Settings) -> dict[str, Any]:
    """Return the fields of a recipe, from Megatron-LM's arguments."""
    half = "bf16" if "bf16" in settings else "fp16" if "fp16" in settings else None
    with_fp8 = "_with_fp8_current_scaling" if "fp8-format" in settings else ""
    result: dict[Any, Any] = {"mixed_precision": half and f"{half}{with_fp8}_mixed"}
    for name, value in settings.items():
        if name in (*_IMPLIED, *_BY_RECIPE, "bf16", "fp16", "fp8-format"):
            continue
        if name in _DENIED:
            result[_DENIED[name]] = False
            continue
        section = _SECTION_OF.get(name, "model")
        for field in _FIELDS.get(name, (f"{section}.{name.replace('-', '_')}",)):
            result[field] = value[0] if name in _LISTED and len(value) == 1 else value
    if settings["tokenizer-type"] == "NullTokenizer":  # none was chosen: the recipe's stays
        del result["tokenizer.tokenizer_type"]
        result["model.vocab_size"] = settings["vocab-size"] + 1
    result["model.should_pad_vocab"] = True
    if settings["attention-backend"] == "auto":  # the usual one, which is no text in a recipe
        del result["model.attention_backend"]
    result.setdefault("model.num_query_groups", settings["num-attention-heads"])
    for name, field in _DENIED.items():
        result.setdefault(field, name not in settings)
    layout = settings.get("pipeline-model-parallel-layout")
    if layout is not None:
        stages = len(re.sub(r"\(([^)]+)\)\*(\d+)", lambda item: item[1] * int(item[2]), layout).split("|"))
        chunks = stages // settings["pipeline-model-parallel-size"]
        result["model.virtual_pipeline_model_parallel_size"] = chunks if chunks > 1 else None
    return {**_OFF, **result}


def render(settings: Settings, notes: Sequence[str]) -> str:
    """Return a bash script that defines OVERRIDES and, unless it is sourced, starts a recipe with them."""
    world: int = settings["world-size"]
    node: int = min(_NODE, world) if world % min(_NODE, world) == 0 else world
    nodes = world // node
    recipe = [name for name in _BY_RECIPE if name in settings]
    lines = [
        "#!/usr/bin/env bash",
        f"# A recipe of Megatron-Bridge {VERSION} (NeMo) on {world} processes, written by Stretto.",
        *(f"# {note}" for note in notes),
        "# The recipe must be of this model: its activation, norms and attention are the recipe's.",
        *(f"# no override, look for it in the recipe: {name} {_hydra(settings[name])}" for name in recipe),
        "# Run it to train, or source it for the array of overrides.",
        "set -euo pipefail",
        "",
        "OVERRIDES=(",
        *(f"  {_override(field, value)}" for field, value in overrides(settings).items()),
        ")",
        "",
        'if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then',
        f'  torchrun --nproc-per-node "${{GPUS_PER_NODE:-{node}}}" --nnodes "${{NNODES:-{nodes}}}" \\',
        "    ${TORCHRUN_ARGS:-} \\",
        '    "${MEGATRON_BRIDGE:?the folder of Megatron-Bridge}/scripts/training/run_recipe.py" \\',
        '    --recipe "${RECIPE:?such as llama3_8b_pretrain_config}" "${OVERRIDES[@]}"',
        "fi",
    ]
    return "\n".join(lines) + "\n"


def _override(field: str, value: Any) -> str:
    """Return `section.field=value` as Hydra takes it, quoted for bash if necessary."""
    if isinstance(value, Unset):
        variable = re.sub(r"\W", "_", value.name).upper()
        return f'{field}="${{{variable}:?{value.name}, such as {value.example}}}"'
    return shlex.quote(f"{field}={_hydra(value)}")


def _hydra(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(_hydra(item) for item in value)}]"  # pyright: ignore[reportUnknownVariableType]
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if re.fullmatch(r"[\w.+/-]*", text) else f'"{text}"'


# ------------------------------------------------------------------ what differs from Megatron-LM


def _checked(rule: Rule) -> Rule:
    """Return the rule with checks for what Megatron-Bridge lacks."""
    checks = [check for field, check in _CHECKS if name_of(field) in rule.fields]

    def write(values: JobValues) -> Settings:
        for check in checks:
            check(values)
        return rule.write(values)

    return replace(rule, write=write, read=None) if checks else replace(rule, read=None)


def _check_gradients(values: JobValues) -> None:
    if values[JOB.precision.gradients] == "same" and values[JOB.precision.dtype] in ("bfloat16", "float16"):
        instead = "Megatron-Bridge's recipes of types reduce gradients in float32"
        raise refused(JOB.precision.gradients, "same", instead, ("float32",))


def _check_decay(values: JobValues) -> None:
    shape = values[RATE.decay]
    if values[RATE.schedule] == "wsd" and shape not in ("linear", "cosine"):
        instead = f"the scheduler of Megatron-Bridge {VERSION} decays linearly or as a cosine"
        raise refused(RATE.decay, shape, instead, ("linear",))


def _check_states(values: JobValues) -> None:
    instead = "types of states are no overrides of a recipe in Megatron-Bridge"
    require(values, JOB.optimiser.states, ("float32",), instead)


def _check_retained(values: JobValues) -> None:
    instead = "Megatron-Bridge keeps the newest checkpoints (checkpoint.most_recent_k), or all"
    require(values, RUN.checkpoint.keep_every, (None,), instead)


_CHECKS: Sequence[tuple[object, Callable[[JobValues], None]]] = (
    (JOB.precision.gradients, _check_gradients),
    (RATE.decay, _check_decay),
    (JOB.optimiser.states, _check_states),
    (RUN.checkpoint.keep_every, _check_retained),
)


def _as_run(job: Job, settings: Settings) -> Job:
    result = as_run(job, settings)
    ways = framework_behaviour("nemo", dp=job.dp, precision=job.precision, recompute=result.framework)
    return replace(result, framework=ways)


NEMO = replace(
    MEGATRON,
    name="nemo",
    title=f"Megatron-Bridge {VERSION}",
    rules=tuple(_checked(rule) for rule in MEGATRON.rules),
    render=render,
    parse=None,
    as_run=_as_run,
)
