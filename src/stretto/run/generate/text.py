"""Text from a checkpoint, whatever layout wrote it, in one process or on tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.checkpoint.huggingface.folder import read_json
from stretto.engine.checkpoint.index import MODEL, OPTIM
from stretto.engine.checkpoint.load import load
from stretto.engine.checkpoint.manifest import read_manifest
from stretto.engine.models.build import build
from stretto.engine.models.generate import stream
from stretto.engine.models.language import LanguageModel
from stretto.engine.models.sharding import sharding_plan
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import Plan, materialise, parallelize
from stretto.engine.parallel.styles import Replicate, VocabParallel
from stretto.errors import StrettoError
from stretto.job.families import FAMILIES
from stretto.job.job import Job
from stretto.job.shape import ModelShape, shape_from_record
from stretto.layout.layout import Layout
from stretto.run.data.boundaries import boundaries_of
from stretto.run.data.chat_template import ChatTemplate
from stretto.run.data.tokenizer import Tokenizer
from stretto.run.train.companions import GENERATION, run_folder


def shape_of(checkpoint: Path) -> ModelShape:
    """The shape of a checkpoint's language model.

    Raises:
        StrettoError: the checkpoint is of no language model.
    """
    sizes = read_manifest(checkpoint).meta.get("model")
    if not isinstance(sizes, dict):
        raise StrettoError(f"checkpoint {checkpoint} does not say what model it is of")
    record = cast("dict[str, Any]", sizes)
    if record.get("family") not in FAMILIES:
        raise StrettoError(
            f"checkpoint {checkpoint} is of {record.get('family')!r}, which generates no text",
            hint=f"families that do: {', '.join(FAMILIES)}",
        )
    return shape_from_record(record)


def load_model(
    checkpoint: Path, *, mesh: Mesh | None = None, dtype: torch.dtype = torch.float32, check: bool = True
) -> LanguageModel:
    """The model with a checkpoint's weights, whatever layout wrote it, in evaluation mode: plain, or on one
    of several tensor-parallel ranks, which then reads only its part, and whose head gives the logits of the
    whole vocabulary. Collective.

    Args:
        mesh: of the tensor-parallel ranks, and this rank's device; None: this process alone, on the CPU.
        check: read every byte first; not needed for a checkpoint that a run has just saved.

    Raises:
        StrettoError: the checkpoint is damaged or is no language model's.
    """
    mesh = Mesh(Layout()) if mesh is None else mesh
    shape = without_dropout(shape_of(checkpoint))
    with torch.device("meta"):
        model = build(shape)
    plan: Plan = {name: Replicate() for name, _ in model.named_children()}
    if mesh.size("tp") > 1:
        job = Job(shape=shape, layout=mesh.layout)
        plan = {**sharding_plan(job), "head.out": VocabParallel(gather_logits=True)}
    table = parallelize(model, plan, mesh)
    weights = materialise(model.layers(), table, None, mesh.device, dtype)
    tensors = {MODEL + name: (weight.detach(), table[name].placed) for name, weight in weights.items()}
    load(checkpoint, tensors, ignore=[OPTIM], check=check)
    return model.eval()


def without_dropout(shape: ModelShape) -> ModelShape:
    """The shape of a model that is not trained any more."""
    lora = None if shape.lora is None else replace(shape.lora, dropout=0.0)
    return replace(shape, dropout=0.0, lora=lora)


def load_tokenizer(checkpoint: Path) -> Tokenizer:
    """The tokenizer that the run kept beside its checkpoints.

    Raises:
        StrettoError: it is not there.
    """
    for folder in (checkpoint, *checkpoint.parents[:2]):
        if (folder / "tokenizer.json").is_file():
            trained = boundaries_of(read_manifest(checkpoint).meta)
            if trained is None:
                return Tokenizer.load(folder / "tokenizer.json", chat=True)
            begin = "" if trained.begin is None else trained.begin
            return Tokenizer.load(folder / "tokenizer.json", end=trained.end, begin=begin)
    raise StrettoError(
        f"no tokenizer.json beside checkpoint {checkpoint}",
        hint="keep it in the run's folder, as training does",
    )


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        tokens: most to generate.
        temperature: divides the logits; 0: the likeliest token.
        top_k, top_p: sample from the k likeliest, and of these from those that together have probability p.
        seed: of the first prompt; the next has the next.
    """

    tokens: int = 100
    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What a text starts with: as it was given, and as tokens."""

    text: str
    ids: list[int]


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A text that follows a prompt.

    Attributes:
        tokens: generated, with the one that ended it.
        ended: by a stop token or text; else by the number of tokens.
    """

    prompt: str
    text: str
    tokens: int
    ended: bool


@dataclass(frozen=True, kw_only=True)
class Wording:
    """How texts become tokens and tokens texts, and where a text ends.

    Attributes:
        stops: ids that end a text.
        stop_texts: what ends it too, where it comes up in the text.
        template: of conversations, where the tokenizer has one.
    """

    tokenizer: Tokenizer
    stops: Sequence[int]
    stop_texts: Sequence[str] = ()
    template: ChatTemplate | None = None

    @classmethod
    def load(cls, checkpoint: Path, *, stop: Sequence[str] = (), template: str | None = None) -> Wording:
        """With the tokenizer that the checkpoint's run kept.

        Args:
            stop: texts or special tokens that end a text, beside the ends that tokenizer and
                `generation_config.json` have.
            template: of conversations, as `ChatTemplate.find` takes it.

        Raises:
            StrettoError: tokenizer or template cannot be read.
        """
        tokenizer, folder = load_tokenizer(checkpoint), run_folder(checkpoint)
        chat = ChatTemplate.find(folder, template)
        ids = {name: tokenizer.special(name) for name in stop}
        ends = {tokenizer.endoftext, *(id_ for id_ in ids.values() if id_ is not None)}
        if chat is not None:
            ends.add(tokenizer.special(chat.special_tokens.get("eos_token", "")) or tokenizer.endoftext)
        eos = read_json(folder, GENERATION).get("eos_token_id") if (folder / GENERATION).is_file() else None
        listed = cast("list[object]", eos) if isinstance(eos, list) else [eos]
        ends.update(id_ for id_ in listed if isinstance(id_, int))
        return cls(
            tokenizer=tokenizer,
            stops=sorted(ends),
            stop_texts=[name for name, id_ in ids.items() if id_ is None],
            template=chat,
        )

    def prompt(self, text: str) -> Prompt:
        """A text to go on from, after what the tokenizer begins every text with."""
        ids = [*self.tokenizer.begin, *self.tokenizer.encode(text)]
        return Prompt(text=text, ids=ids or [self.tokenizer.endoftext])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """A conversation to answer; arguments as `ChatTemplate.render`.

        Raises:
            StrettoError: there is no chat template, or it refuses the messages.
        """
        if self.template is None:
            raise StrettoError(
                "the run's tokenizer has no chat template",
                hint="name one with --chat-template FILE, or leave --chat out",
            )
        text = self.template.render(messages, tools=tools, prompt=True, arguments=arguments).text
        ((ids, _),) = self.tokenizer.encode_templated([text])
        return Prompt(text=text, ids=ids)

    def generated(self, prompt: Prompt, ids: Sequence[int]) -> Generated:
        """The text of sampled tokens, up to where it ends."""
        end = next((at for at, token in enumerate(ids) if token in self.stops), None)
        sampled = list(ids if end is None else ids[:end])
        if self.stop_texts:  # the shortest beginning that has one
            for count in range(1, len(sampled) + 1):
                if (text := self._before_stop(self.tokenizer.decode(sampled[:count]))) is not None:
                    return Generated(prompt=prompt.text, text=text, tokens=count, ended=True)
        tokens = len(sampled) + (end is not None)
        text = self.tokenizer.decode(sampled)
        return Generated(prompt=prompt.text, text=text, tokens=tokens, ended=end is not None)

    def _before_stop(self, text: str) -> str | None:
        """What comes before the first stop text; None where there is none."""
        starts = [text.find(stop) for stop in self.stop_texts if stop in text]
        return text[: min(starts)] if starts else None

    def pieces(self, tokens: Iterator[Tensor]) -> Iterator[str]:
        """The text of tokens, as soon as it cannot change any more: whole characters that do not begin a stop
        text.
        """
        ids, shown = list[int](), 0
        reserve = max((len(stop) - 1 for stop in self.stop_texts), default=0)
        text = ""
        for token in tokens:
            if int(token[0]) in self.stops:
                break
            ids.append(int(token[0]))
            text = self.tokenizer.decode(ids)
            if (before := self._before_stop(text)) is not None:
                text = before
                break
            if (
                not text.endswith("\ufffd") and len(text) - reserve > shown
            ):  # wait for the rest of a character
                yield text[shown : len(text) - reserve]
                shown = len(text) - reserve
        if len(complete := text.rstrip("\ufffd")) > shown:
            yield complete[shown:]


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A model that writes text.

    Attributes:
        group: ranks that share the model; None: it is this process's alone.
    """

    model: LanguageModel
    wording: Wording
    group: ProcessGroup | None = None

    @classmethod
    def load(
        cls,
        checkpoint: Path,
        wording: Wording,
        *,
        mesh: Mesh | None = None,
        dtype: torch.dtype = torch.float32,
        check: bool = True,
    ) -> Writer:
        """With a checkpoint's model, as `load_model` has it."""
        model = load_model(checkpoint, mesh=mesh, dtype=dtype, check=check)
        return cls(model=model, wording=wording, group=None if mesh is None else mesh.group("tp"))

    def stream(self, prompt: Prompt, sampling: Sampling) -> Iterator[str]:
        """The text that follows one prompt, piece by piece.

        Raises:
            StrettoError: at once, for arguments out of range or a tokenizer that is not the model's.
        """
        return self.wording.pieces(self._tokens([prompt], sampling, [0]))

    def write(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Generated]:
        """The texts that follow the prompts, each the same as if it were the only one but for its seed.

        Prompts of equal length are computed together; nothing is padded.

        Raises:
            StrettoError: as `stream`.
        """
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
        written = dict[int, Generated]()
        for _, group in groupby(by_length, lambda i: len(prompts[i].ids)):
            numbers = list(group)
            tokens = self._tokens([prompts[i] for i in numbers], sampling, numbers)
            rows = torch.stack(list(tokens), dim=1).tolist() if sampling.tokens else [[] for _ in numbers]
            for number, row in zip(numbers, rows, strict=True):
                written[number] = self.wording.generated(prompts[number], row)
        return [written[i] for i in range(len(prompts))]

    def _tokens(
        self, prompts: Sequence[Prompt], sampling: Sampling, numbers: Sequence[int]
    ) -> Iterator[Tensor]:
        device = self.model.embed.tok.weight.device
        return stream(
            model=self.model,
            ids=torch.tensor([prompt.ids for prompt in prompts], device=device),
            max_new_tokens=sampling.tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            generator=[torch.Generator(device).manual_seed(sampling.seed + number) for number in numbers],
            group=self.group,
            stop=self.wording.stops,
        )
