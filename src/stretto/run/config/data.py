"""The section of a training job that says what a language model reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from stretto.errors import Problem
from stretto.job.field import Field
from stretto.run.config.denoising import USUAL_DENSITY, Corruption, Denoising, denoising

Objective = Literal["causal", "span-corruption", "infilling"]
Packing = Literal["documents", "stream", "none"]
InputFormat = Literal["text", "jsonl", "json", "csv", "tsv", "parquet"]
OnError = Literal["stop", "skip"]

DEFAULT_RATIO = "949,50,1"
"""Of training, evaluation and test text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How files of text are read: the fields of the same names of the config, `format` as `input_format`."""

    text_field: str = "text"
    input_format: InputFormat | None = None
    on_error: OnError = "stop"


@dataclass(frozen=True, kw_only=True)
class MixturePhase:
    """The weights of a mixture from a step on."""

    from_step: Annotated[int, Field("Steps before it.", gt=0)]
    weights: Annotated[
        dict[str, float], Field("The weight of each source; one that is not named has none from here on.")
    ]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the model reads."""

    source: Annotated[
        str | list[str] | dict[str, float],
        Field(
            "`python-stdlib` (the source of Python's own library), a file of text, JSON, CSV or Parquet, a "
            "folder of them, a glob, or a list of these; or tokens, which are read as they lie: a token "
            "folder that `stretto data build` wrote, `stretto-sample` (a small one that comes with the "
            "package), a Megatron dataset by its `PREFIX`, or a list of these; or a mixture of any of these "
            "by weights, as `{web/: 0.7, code/: 0.3}`. Files and tokens may be at URLs, such as "
            "`s3://bucket/tokens`. `FILE.py:NAME` is a function of your own that returns texts: see "
            "docs/do/own-model.md."
        ),
    ] = "python-stdlib"
    phases: Annotated[
        list[MixturePhase],
        Field(
            "Other weights of a mixture from later steps on, as `[{from_step: 1000, weights: {web/: 0.2, "
            "code/: 0.8}}]`."
        ),
    ] = field(default_factory=list[MixturePhase])
    tokenizer: Annotated[
        str | list[str] | None,
        Field(
            "A `tokenizer.json`, GPT-2's `vocab.json` with its `merges.txt` beside it, a SentencePiece "
            "`.model`, a `.tiktoken` file, a `tekken.json`, or a folder that has one of these; or two files: "
            "vocabulary and merges, or ranks of tiktoken and a file with the regular expression that cuts "
            "words. null: a byte-level BPE is trained on the source once and kept."
        ),
    ] = None
    vocab: Annotated[int, Field("Entries of the tokenizer that is trained when none is given.", ge=257)] = (
        4096
    )
    end_of_text: Annotated[
        str | int | None,
        Field(
            "The token that ends each document, by its text or id; null: the one that the files of the "
            "tokenizer's model name (`tokenizer_config.json`, `generation_config.json`, ...)."
        ),
    ] = None
    begin_of_text: Annotated[
        str | int | None,
        Field(
            "The token that begins each document, by its text or id, or an empty text for none; null: the "
            "one that the tokenizer's model begins texts with, if it does."
        ),
    ] = None
    text_field: Annotated[
        str, Field("The field of JSON, or the column of CSV and Parquet, that holds the text.", filled=True)
    ] = "text"
    format: Annotated[
        InputFormat | None,
        Field(
            "The format of all files of `source`: plain `text`, JSON lines (`jsonl`), a JSON array (`json`), "
            "`csv` or `tsv` with a row of names, or `parquet`. null: of each file as its content and its "
            "name show it; one that may be read in two ways is an error."
        ),
    ] = None
    on_error: Annotated[
        OnError,
        Field(
            "Rows that cannot be read (not JSON, not UTF-8, without the field or with something else in it): "
            "`stop` at the first, or `skip` and count them, up to a tenth of a file's rows."
        ),
    ] = "stop"
    chat: Annotated[
        Literal["assistant", "all"] | None,
        Field(
            "The rows of JSON or Parquet are conversations: `messages` with roles, or `prompt` and "
            "`completion`. The loss counts the tokens of the `assistant`, or `all`. null: the source is "
            "text."
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Field(
            "With `chat`: a file with a Jinja template, or the name of one of the tokenizer's; null: the "
            "tokenizer's own."
        ),
    ] = None
    packing: Annotated[
        Packing | None,
        Field(
            "What fills a sample. `stream`: documents one after another, and attention crosses them. "
            "`documents`: the same, but attention stays inside each, positions begin anew, and no token is "
            "predicted from those of another document. `none`: one document, padded or cut to `sequence`. "
            "null: `stream` for text, `none` for conversations."
        ),
    ] = None
    too_long: Annotated[
        Literal["truncate", "drop"],
        Field(
            "With `packing: none`, what becomes of documents longer than `sequence`: the end is cut off, or "
            "they are left out."
        ),
    ] = "truncate"
    objective: Annotated[
        Objective | None,
        Field(
            "What is predicted. `causal`: each next token. For an encoder-decoder, which reads windows of "
            "the text with spans cut out: `span-corruption`, the spans, each of which leaves a sentinel in "
            "the encoder's input (T5), or `infilling`, the whole text, of which each span leaves a mask "
            "(BART). null: `span-corruption` with an encoder, `causal` without."
        ),
    ] = None
    noise_density: Annotated[
        float | None,
        Field(
            "The part of the text that is cut out; null: 0.15 for `span-corruption`, 0.3 for `infilling`.",
            gt=0,
            lt=1,
        ),
    ] = None
    mean_span_length: Annotated[
        float, Field("Mean length of the spans that are cut out, in tokens.", ge=1)
    ] = 3.0
    sentinels: Annotated[
        int | None,
        Field(
            "Entries that the vocabulary has for sentinels or the mask beside the tokenizer's, where "
            "`model.vocab` is null and the tokenizer has none of them; null: 100 for `span-corruption`, 1 "
            "for `infilling`.",
            gt=0,
        ),
    ] = None
    first_sentinel: Annotated[
        int | None,
        Field(
            "The id of the first span's sentinel, from which those of later spans count down, or of the "
            "mask; null: the tokenizer's (`<extra_id_0>`, `<mask>`), else the last of the vocabulary.",
            ge=0,
        ),
    ] = None
    split: Annotated[
        str | None,
        Field(
            "Ratio of training, evaluation and test text: three numbers; null: files named as training and "
            "as held-out text (`train.txt`, `valid.txt`, `test.txt`) are kept apart, else 949,50,1.",
            pattern=r"^\s*\d+(\.\d+)?(\s*,\s*\d+(\.\d+)?){2}\s*$",
            examples=("949,50,1",),
        ),
    ] = None
    sequence: Annotated[
        int, Field("Tokens of a sample; of a model with an encoder, those that it reads.", gt=0)
    ] = 128
    target_sequence: Annotated[
        int | None,
        Field(
            "Tokens of the decoder's sample of a model with an encoder; null: as many as the objective "
            "makes.",
            gt=0,
        ),
    ] = None
    shuffle: Annotated[
        Literal["global", "window"] | None,
        Field(
            "The order of the samples of an epoch. `global`: any may come next. `window`: runs of "
            "neighbouring samples are shuffled, then the samples of 64 runs at a time, so that every part of "
            "a source is read within one stretch of the epoch. null: `window` for sources at URLs, `global` "
            "for others."
        ),
    ] = None
    shuffle_window: Annotated[
        int, Field("Tokens that are shuffled at a time with `shuffle: window`.", gt=0)
    ] = 1 << 29
    cache: Annotated[
        str | None,
        Field(
            "Folder that keeps tokenizers, token files and blocks of sources at URLs; null: the user's cache "
            "folder."
        ),
    ] = None
    cache_gib: Annotated[
        float,
        Field(
            "Disk space that blocks of sources at URLs may take in `cache` on each machine, GiB; the longest "
            "unused are dropped first.",
            gt=0,
        ),
    ] = 16.0

    def density(self, corruption: Corruption) -> float:
        """The part of the text that an objective cuts out."""
        return USUAL_DENSITY[corruption] if self.noise_density is None else self.noise_density

    def corruption(self, has_encoder: bool) -> Corruption | None:
        """What replaces the spans that are cut out of a model's samples, or None if nothing is cut out."""
        objective = self.objective or ("span-corruption" if has_encoder else "causal")
        return None if objective == "causal" else objective

    def denoising(self, has_encoder: bool) -> Denoising | None:
        """The lengths of an encoder-decoder's samples, or None if nothing is cut out of them.

        Raises:
            Problem: they cannot be made.
        """
        if (corruption := self.corruption(has_encoder)) is None:
            return None
        try:
            return denoising(corruption, self.sequence, self.density(corruption), self.mean_span_length)
        except Problem as problem:
            raise problem.within("data") from None

    def marks(self, corruption: Corruption) -> int:
        """Entries that the vocabulary has for marks of spans where the tokenizer has none."""
        return self.sentinels or (1 if corruption == "infilling" else 100)

    @property
    def reading(self) -> ReadOptions:
        """How files of text are read."""
        return ReadOptions(text_field=self.text_field, input_format=self.format, on_error=self.on_error)

    @property
    def sources(self) -> list[str]:
        """`source` as a list."""
        return [self.source] if isinstance(self.source, str) else list(self.source)

    @property
    def weights(self) -> dict[str, float] | None:
        """The weights of a mixture; None: the source is not one."""
        return self.source if isinstance(self.source, dict) else None

    @property
    def tokenizer_files(self) -> list[str]:
        """`tokenizer` as a list; empty where none is named."""
        named = self.tokenizer or []
        return [named] if isinstance(named, str) else named
