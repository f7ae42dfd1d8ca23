"""Training a language model: what `Trainer` asks of its task, on one rank."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.engine.checkpoint.folder import is_checkpoint
from stretto.engine.checkpoint.load import load
from stretto.engine.device import random_states, seed_random, set_random_states
from stretto.engine.models.moe import correct
from stretto.engine.optim.norm import ratio
from stretto.engine.optim.rate import LearningRate
from stretto.engine.optim.scale import SMALLEST
from stretto.engine.parallel.replica_check import RankTensors
from stretto.engine.pipeline import Recorder
from stretto.job.finetune import is_router_correction
from stretto.job.lora import is_adapter
from stretto.job.shape import shape_to_record
from stretto.job.user_shape import UserShape
from stretto.run.config.schema import TrainConfig
from stretto.run.data.dataset import shuffled_within
from stretto.run.data.mixture import TrainingSamples, epochs, held_out, parts_of, training_samples
from stretto.run.data.token_source import TokenData
from stretto.run.launch.lease import lost_folder
from stretto.run.train import trace
from stretto.run.train.agreement import StepAgreement, StepReport, describe_bad_loss
from stretto.run.train.batches import Batches, SampleSource, read_ahead
from stretto.run.train.checkpointing import common_meta, log_resumed, restored_progress
from stretto.run.train.evaluate import Evaluation
from stretto.run.train.metrics import EvalRecord, StepRecord
from stretto.run.train.prediction import StepTimePrediction
from stretto.run.train.rank_model import (
    MODEL,
    OPTIM,
    BadGradient,
    RankModel,
    bad_gradient,
    loss_weights,
    name_on_ranks,
    prepare_optimizer,
    replicated_tensors,
    tensors_of,
)
from stretto.run.train.resume import (
    changed_files,
    check_fits,
    checkpoint_path,
    file_digests,
    is_base,
)
from stretto.run.train.speed import ExpertReport, Speed, expert_statistics
from stretto.run.train.task import CheckpointContent, Fault, Log, StepResult, TrainProgress

T = TypeVar("T")
_ORDER = "shuffle_windows"  # in the identity of a text: within how many tokens each stream is shuffled


@dataclass(kw_only=True)
class TextProgress(TrainProgress):
    """How far a language model's run is."""

    tokens: int = 0
    targets: int = 0  # the tokens that the loss counted
    weight_updates: int = 0  # as many as steps, or more if a step updates the weights several times


class LoadedBatch(NamedTuple):
    """A global batch, this rank's part of it.

    Attributes:
        inputs, targets: of each microbatch, on the device.
        targets_counted: tokens that the loss counts in each microbatch, over all replicas; float64
            [microbatches].
    """

    inputs: list[Tensor]
    targets: list[Tensor]
    targets_counted: Tensor


class LanguageTask:
    """Steps of one rank of a language model; a `Task`.

    Args:
        samples: the training samples by index.
        rate: learning rate by step, from 0.

    Attributes:
        bad_gradient: the gradient, or weight, of this rank that an asynchronous step found not to be finite.
        traced_step: number of the step, from 1, in which every call is timed; 0 if none is.
        recorder: times the calls of that step.
    """

    def __init__(self, model: RankModel, samples: SampleSource, rate: LearningRate) -> None:
        self.model, self.mesh = model, model.mesh
        self.rate = rate
        self.device, self.global_batch = model.mesh.device, model.job.global_batch
        self.log: Log = lambda _: None
        self.batches = Batches(model)
        self.bad_gradient: BadGradient | None = None
        self.traced_step = 0
        self.recorder: Recorder | None = None
        self._samples = samples
        self._targets = torch.zeros(())  # tokens that the loss counts in each microbatch of this step
        self._speed = Speed(model, None)

    @property
    def peer_ranks(self) -> Sequence[Sequence[int]]:
        """The ranks of each stage; with a server of the states, which does more than others, each alone."""
        layout = self.model.job.layout
        if self.model.job.dp.mode == "server":
            return [[rank] for rank in range(layout.world)]
        return [list(ranks) for ranks in zip(*layout.groups("pp"), strict=True)]

    def timed(self, label: str, call: Callable[[], T]) -> T:
        """Make a call, and record its time in the traced step."""
        return call() if self.recorder is None else self.recorder.timed(label, call)

    def begin_step(self, step: int, samples: int) -> None:
        """Start the recorder in the traced step."""
        if step + 1 == self.traced_step:
            self.recorder = trace.start(self.mesh)

    def load(self, samples: int, slot: int = 0) -> LoadedBatch:
        """Load the global batch that begins at sample `samples`. Collective with `dp.mode=server`.

        Args:
            slot: number of the step in a window of steps without a drain between them.
        """
        (inputs, targets), counted = self.timed(
            trace.BATCH, lambda: self.batches.take(self._samples, samples, keyed=True, number=slot)
        )
        return LoadedBatch(inputs, targets, counted)

    def batch(self, step: int, samples: int) -> LoadedBatch:
        """Load a batch; see `Task.batch`."""
        self.begin_step(step, samples)
        return self.load(samples)

    def forward_backward(self, batch: LoadedBatch, step: int) -> StepReport:
        """Run the pipeline's program; see `Task.forward_backward`."""
        model, self._targets = self.model, batch.targets_counted
        model.set_rate(self.rate(step))
        # by the targets of all ranks: a mean over means would weigh the tokens of ranks with few targets more
        scale = loss_weights(model.update_numbers, batch.targets_counted)
        return model.loss_report(model.step(batch.inputs, batch.targets, scale, self.recorder))

    def statistics(self) -> dict[str, Tensor]:
        """`targets`, `norm`, and those of the experts; see `Task.statistics`."""
        targets, norm = self._targets.sum()[None], self.model.gradient_norm()[None]
        return {"targets": targets, "norm": norm, **self.expert_statistics()}

    def expert_statistics(self) -> dict[str, Tensor]:
        """The fields of `ExpertReport`, if the model has experts. Collective."""
        statistics = expert_statistics(self.model, self.global_batch * self.model.job.sequence)
        return {} if statistics is None else {"experts": statistics}

    def fault(self, agreed: StepAgreement, norm: float | None, samples: range) -> Fault | None:
        """See `Task.fault`."""
        model, scale = self.model, self.model.loss_scale
        if agreed.bad_microbatches:
            suspects = [
                self.batches.indices(samples.start, self.mesh.layout.index(rank, "dp"))[microbatch]
                for rank, microbatch in agreed.bad_microbatches.items()
            ]
            return Fault(describe_bad_loss(agreed), suspects)
        if norm is None:
            if not agreed.overflow or scale is not None:
                return None
            name = name_on_ranks(self.bad_gradient)
            return Fault(
                f"gradients of an update are not finite, and it was not made; first: {name}", [samples]
            )
        if isfinite(norm) or (scale is not None and scale.value > SMALLEST):
            return None
        smallest = "" if scale is None else " at the smallest loss scale"
        name = name_on_ranks(bad_gradient(model.states, model.shape, model.states.buffers)) or "on no rank"
        return Fault(f"the gradient norm is {norm}{smallest}; first bad gradient: {name}", [samples])

    def update(self, step: int, norm: float | None, apply: bool) -> None:
        """Clip and apply the gradients; see `Task.update`."""
        if not apply:
            return
        assert norm is not None, "an asynchronous schedule has updated already"
        model = self.model
        self.timed(trace.UPDATE, lambda: apply_gradients(model, self.rate(step), norm))
        if isfinite(norm):
            self.update_expert_bias()
        elif model.loss_scale is not None:
            value = model.loss_scale.value
            self.log(f"step {step + 1}: gradients overflow, no update; the loss scale is {value:.10g} now")

    def update_expert_bias(self) -> None:
        """Move the corrections of the experts' scores by the loads of the step. Collective."""
        model, moe = self.model, self.model.shape.moe
        if moe is None or not moe.correction or not moe.correction_rate:
            return
        loads = model.auxiliary.table(model.shape.layers, moe.experts)
        if self.mesh.layout.world > 1:
            dist.all_reduce(loads)
        for name, parameter in model.parameters.items():
            if is_router_correction(name):
                correct(parameter, loads[int(name.split(".")[1])], moe.correction_rate)

    def record(
        self, result: StepResult, progress: TrainProgress, seconds: float, slow: dict[str, float] | None
    ) -> StepRecord:
        """Count a step; see `Task.record`."""
        assert isinstance(progress, TextProgress)
        model, agreed = self.model, result.agreed
        job = model.job
        applied = result.norm is None or (isfinite(result.norm) and result.bad is None)
        progress.weight_updates += max(model.update_numbers) + 1 if applied else 0
        progress.tokens += job.global_batch * job.sequence
        progress.targets += int(agreed.statistic("targets") or 0)
        record = self._speed.record(
            step=result.step,
            loss=result.loss,
            norm=result.norm,
            rate=self.rate(result.step - 1),
            total_tokens=progress.tokens,
            targets=progress.targets,
            tokens=job.global_batch * job.sequence,
            seconds=seconds,
            memory_gib=agreed.memory_gib,
        )
        record = replace(record, slow=slow, bad=None if result.bad is None else result.bad.reason)
        if model.loss_scale is not None:
            record = replace(record, loss_scale=model.loss_scale.value, skipped=model.loss_scale.skipped)
        if "experts" in agreed.statistics:
            experts = ExpertReport(*agreed.statistics["experts"])
            record = replace(
                record,
                expert_loss=experts.loss,
                expert_dropped=experts.dropped,
                expert_busiest=experts.busiest,
            )
        return record

    def tensors(self, purpose: Literal["replicas", "memory"]) -> RankTensors:
        """See `Task.tensors`. With ZeRO 3, weights are gathered when they are used, and only what the
        optimisers hold keeps its bits between two updates.
        """
        if purpose == "memory" and self.model.job.dp.mode == "zero3":
            return tensors_of(self.model)
        return replicated_tensors(self.model)

    def bad_weight(self) -> str | None:
        """See `Task.bad_weight`."""
        return self.model.bad_weight()

    def details(self) -> dict[str, Any]:
        """The median speed in tokens per second, or None before the first step."""
        return {"tokens_per_s": self._speed.median}


def apply_gradients(model: RankModel, rate: float, norm: float) -> None:
    """Clip the gradients of a step and apply them at learning rate `rate`. Nothing is applied if the norm is
    not finite; the loss scale of float16 is adjusted. Collective.

    Args:
        norm: what `RankModel.gradient_norm` returned.
    """
    optimizer, scale = model.optimizer, model.loss_scale
    factor = ratio(norm, model.job.optimiser.clip, model.loss_factor)
    if scale is not None:
        scale.update(not isfinite(norm))
    if not isfinite(norm):
        return
    if not optimizer.eager:  # otherwise updates have begun, at the rate that was set before
        model.set_rate(rate)
    (sharded,) = optimizer.sharded
    if optimizer.offloaded:  # copies of the gradients are on their way already
        sharded.step(ratio=factor)
    else:
        gradients = model.gradients()
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
        sharded.step()


class LanguageRun(LanguageTask):
    """A language model's run: steps on the text of a config, evaluations, and checkpoints.

    Args:
        source: the tokens of the text.
        reports: True if this rank writes the metrics, and predicts step times.
    """

    recorder: Recorder | None  # declared again: this class ends it too

    def __init__(
        self, config: TrainConfig, model: RankModel, source: TokenData, reports: bool = False
    ) -> None:
        self._training_samples: TrainingSamples = training_samples(
            source, config.data, model.job, config.train.seed
        )
        self._reader = read_ahead(self._training_samples, model)
        super().__init__(model, self._reader, LearningRate.of(model.job.optimiser, config.train.steps))
        self.config, self.source = config, source
        self._speed = Speed(model, config.metrics.peak_tflops)
        train = config.train
        self._prediction = (
            StepTimePrediction(model.job, config.run.folder, train.device, train.threads) if reports else None
        )
        self._evaluation: Evaluation | None = None
        if config.eval.every:
            splits = held_out(source, config.data, model.job, "valid")
            self._evaluation = Evaluation(model, self.batches, splits, config.eval.batches)

    def start(self, checkpoint: Path | None) -> TextProgress:
        """Return where the run starts: after the checkpoint, from which it is restored, or at step 0.
        `metrics.trace` counts steps from there. Collective.
        """
        progress = TextProgress() if checkpoint is None else self.restore(checkpoint)
        if trace_after := self.config.metrics.trace:
            self.traced_step = progress.step + min(trace_after, self.config.train.steps - progress.step)
        return progress

    def begin_step(self, step: int, samples: int) -> None:
        """Start the recorder in the traced step, and warn of each source whose second epoch begins."""
        super().begin_step(step, samples)
        parts, before = parts_of(self._training_samples), epochs(self._training_samples, samples)
        for name, after in epochs(self._training_samples, samples + self.global_batch).items():
            if before[name] <= 1 < after:
                of_source = f" of {name}" if len(parts) > 1 else ""
                self.log(
                    f"step {step + 1} begins a second epoch of {len(parts[name]):,} training samples"
                    f"{of_source}: the training loss is now of text seen before, and the held-out loss "
                    "(eval.every) tells whether the model still gets better"
                )

    def record(
        self, result: StepResult, progress: TrainProgress, seconds: float, slow: dict[str, float] | None
    ) -> StepRecord:
        """Count a step; see `Task.record`. Writes the trace of a traced step. Collective."""
        compiler, prediction = self.model.compiler, self._prediction
        if compiler is not None and (news := compiler.news()):
            self.log(f"step {progress.step}: {news}")
        if self.recorder is not None and result.step == self.traced_step:
            self._write_trace(self.recorder)
            self.recorder = None
        record = super().record(result, progress, seconds, slow)
        passes = epochs(self._training_samples, result.samples)
        record = replace(record, epoch=max(passes.values()), epochs=passes if len(passes) > 1 else None)
        if prediction is not None:
            prediction.add(seconds)
            if prediction.estimate is not None:
                record = replace(record, bubble=prediction.estimate.bubble)
        return record

    def _write_trace(self, recorder: Recorder) -> None:
        """Gather what all ranks recorded, and report it next to the replay. Collective."""
        pipelines, run = trace.gather(recorder, self.mesh), self.config.run
        if pipelines is None or lost_folder(run.folder) is not None:
            return
        job, prediction = self.model.job, self._prediction
        written = trace.write(
            title=f"{run.name}, {job.shape.title} on {job.layout}, {platform.node()}",
            folder=run.folder,
            step=self.traced_step,
            program=self.model.pipeline.program,
            pipelines=pipelines,
            expected=None if prediction is None else prediction.estimate,
        )
        missing = prediction is not None and prediction.estimate is None
        reason = f"no prediction: {prediction.reason}\n" if prediction is not None and missing else ""
        self.log(f"traced step {self.traced_step}: {written.trace}, {written.page}\n{reason}{written.text}")

    def evaluate(self, step: int) -> tuple[float, EvalRecord]:
        """The loss on the first `eval.batches` global batches of the held-out split, or on all of a smaller
        one; see `Task.evaluate`.
        """
        assert self._evaluation is not None
        record = self._evaluation.run(step)
        assert record is not None, "no stop is asked for"
        return record.loss, replace(record, text_bytes=self._evaluation.text_bytes)

    def checkpoint(self, progress: TrainProgress) -> CheckpointContent:
        """See `Task.checkpoint`."""
        assert isinstance(progress, TextProgress)
        model, source = self.model, self.source
        shape = model.shape
        meta: dict[str, Any] = {
            **common_meta(progress, self.config.train.seed),
            "tokens": progress.tokens,
            "targets": progress.targets,
            "updates": progress.weight_updates,
            "loss_scale": None if model.loss_scale is None else model.loss_scale.state(),
            "model": shape.record() if isinstance(shape, UserShape) else shape_to_record(shape),
            "layout": self.mesh.layout.describe(),
            "schedule": model.pipeline.program.name,
            "tokenizer": source.fingerprint,
            "end_of_text": source.endoftext,
            "begin_of_text": source.begin_of_text,
            "text": self._text_identity(progress.samples),
        }
        if digests := file_digests(self.config.user_parts):
            meta["user_files"] = digests
        return CheckpointContent(tensors=tensors_of(model), meta=meta, per_rank=random_states(self.device))

    def restore(self, path: Path, check: bool | None = None) -> TextProgress:
        """Fill the model and its optimisers from a checkpoint, whatever layout wrote it; see `Task.restore`.

        An imported checkpoint may have weights only: training then starts with them at step 0, as it does
        with the base of new adapters. One that was imported with an optimiser's states continues from its
        step, with the first samples.

        Raises:
            StrettoError: it is damaged, or of another model or tokenizer.
        """
        config = self.config
        model, seed = self.model, self.config.train.seed
        resume = config.checkpoint.resume
        meta = check_fits(path, model.job, self.source, config.checkpoint.may_differ)
        base = is_base(meta, model.shape)
        if "step" not in meta or base:
            load_weights(model, path, check=resume != "auto", adapters=not base)
            self.log(f"starting from the weights of {path}")
            return TextProgress()
        weight_updates = meta.get("updates", meta["step"])  # older checkpoints have one update a step
        prepare_optimizer(model, weight_updates)
        # `latest` has checked every byte already; a checkpoint named by its path is checked here
        check = is_checkpoint(checkpoint_path(resume, config.run.folder)) if check is None else check
        loaded = load(path, tensors_of(model), check=check)
        model.refresh()
        if model.loss_scale is not None and meta.get("loss_scale"):
            model.loss_scale.load(meta["loss_scale"])
        # the draws of other ranks or of another kind of device cannot be continued, nor may they come again
        seed_random(model.mesh.device, crc32(f"{seed} {meta['step']}".encode()))
        set_random_states(model.mesh.device, loaded.per_rank)
        if not loaded.per_rank:
            self.log(
                f"random generators begin anew, from the seed and step {meta['step']}: other ranks wrote it"
            )
        text = self._text_identity(meta["samples"])
        saved = meta.get("text", text)  # an imported run's is unknown
        changed = None if saved == text else _changed_text(saved, text)
        log_resumed(path, meta, seed, self.log, changed)
        for sentence in changed_files(meta.get("user_files", {}), config.user_parts, path.parent.parent):
            self.log(sentence)
        return TextProgress(
            **restored_progress(meta, self.global_batch),
            tokens=meta["tokens"],
            targets=meta.get("targets", meta["tokens"]),  # older checkpoints are of text without a mask
            weight_updates=weight_updates,
        )

    def _text_identity(self, samples: int) -> dict[str, Any]:
        """Return what identifies the first `samples` samples of the run, independent of paths."""
        source = self.source
        data, batch = self.config.data, self.global_batch
        text = {**source.identity(), "sequence": data.sequence}
        started_phases = [phase for phase in data.phases if phase.from_step * batch < samples]
        if started_phases:
            text["phases"] = [
                {"samples": phase.from_step * batch, "weights": list(phase.weights.values())}
                for phase in started_phases
            ]
        if any(windows := [shuffled_within(stream, data) for stream in source.streams.values()]):
            text[_ORDER] = windows  # an order without is that of older checkpoints
        if any(named := [dict(each.named_splits) for each in source.streams.values()]) and data.split is None:
            text["splits"] = [{name: tokens for name, (tokens, _) in each.items()} for each in named]
        if (lengths := self.config.denoising) is not None:
            text["denoising"] = asdict(lengths)
        if source.trained is None and data.packing in (None, "stream"):
            return text
        return {"trained": None, **text, "packing": data.packing, "too_long": data.too_long}

    def close(self) -> None:
        """Stop reading samples ahead."""
        self._reader.close()

    def details(self) -> dict[str, Any]:
        """The median speed; writes the prediction next to it to the run's folder."""
        if self._prediction is not None and (summary := self._prediction.end()):
            self.log(summary)
        return super().details()


def load_weights(model: RankModel, path: Path, check: bool = True, adapters: bool = True) -> None:
    """Fill the model's weights from a checkpoint of any layout, and no optimiser's states. Collective.

    Args:
        check: read every byte first; not needed after `find_checkpoint`.
        adapters: fill those of adapters too; otherwise they keep their values.

    Raises:
        StrettoError: it is damaged, or of another model.
    """
    tensors = {
        name: tensor
        for name, tensor in tensors_of(model).items()
        if name.startswith(MODEL) and (adapters or not is_adapter(name))
    }
    load(path, tensors, ignore=[OPTIM], check=check)
    model.refresh()


def _changed_text(saved: dict[str, Any], text: dict[str, Any]) -> str:
    """Return what of the data differs from a checkpoint's, as the subject of a sentence."""

    def without_weights(identity: dict[str, Any]) -> dict[str, Any]:
        parts = [{**part, "weight": None} for part in identity.get("mixture", ())]
        return {**identity, "mixture": parts, "phases": None}

    if {**saved, _ORDER: None} == {**text, _ORDER: None}:
        return "data.shuffle or data.shuffle_window, the order of the samples,"
    if without_weights(saved) == without_weights(text):
        return "the mixture's weights of steps that are done (data.phases changes those of later ones)"
    if {**saved, "splits": None} == {**text, "splits": None}:
        return "data.split or the names of files, and with them the held-out text,"
    if {**saved, "denoising": None} == {**text, "denoising": None}:
        return "data.objective, data.noise_density or data.mean_span_length"
    return "the text or data.sequence"
