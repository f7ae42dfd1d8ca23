"""The section of a training job that says what a language model reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from stretto.run.config.denoising import USUAL_DENSITY, Corruption
from stretto.run.config.section import Section

Objective = Literal["causal", "span-corruption", "infilling"]
Packing = Literal["documents", "stream", "none"]
InputFormat = Literal["text", "jsonl", "json", "csv", "tsv", "parquet"]
OnError = Literal["stop", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How files of text are read: the fields of the same names of the config, `format` as `input_format`."""

    text_field: str = "text"
    input_format: InputFormat | None = None
    on_error: OnError = "stop"


class MixturePhase(Section):
    """The weights of a mixture from a step on."""

    from_step: int = Field(gt=0, description="Steps before it.")
    weights: dict[str, float] = Field(
        description="The weight of each source; one that is not named has none from here on."
    )


class DataConfig(Section):
    """What the model reads."""

    source: str | list[str] | dict[str, float] = Field(
        default="python-stdlib",
        description="`python-stdlib` (the source of Python's own library), a file of text, JSON, CSV or "
        "Parquet, a folder of them, a glob, or a list of these; or tokens, which are read as they lie: a "
        "token folder that `stretto data build` wrote, `stretto-sample` (a small one that comes with the "
        "package), a Megatron dataset by its `PREFIX`, or a list of these; or a mixture of any of these by "
        "weights, as `{web/: 0.7, code/: 0.3}`. Files and tokens may be at URLs, such as `s3://bucket/tokens`.",
    )
    phases: list[MixturePhase] = Field(
        default_factory=list[MixturePhase],
        description="Other weights of a mixture from later steps on, as "
        "`[{from_step: 1000, weights: {web/: 0.2, code/: 0.8}}]`.",
    )
    tokenizer: str | list[str] | None = Field(
        default=None,
        description="A `tokenizer.json`, GPT-2's `vocab.json` with its `merges.txt` beside it, a "
        "SentencePiece `.model`, a `.tiktoken` file, a `tekken.json`, or a folder that has one of these; or "
        "two files: vocabulary and merges, or ranks of tiktoken and a file with the regular expression that "
        "cuts words. null: a byte-level BPE is trained on the source once and kept.",
    )
    vocab: int = Field(
        default=4096, ge=257, description="Entries of the tokenizer that is trained when none is given."
    )
    end_of_text: str | int | None = Field(
        default=None,
        description="The token that ends each document, by its text or id; null: the one that the files of "
        "the tokenizer's model name (`tokenizer_config.json`, `generation_config.json`, ...).",
    )
    begin_of_text: str | int | None = Field(
        default=None,
        description="The token that begins each document, by its text or id, or an empty text for none; "
        "null: the one that the tokenizer's model begins texts with, if it does.",
    )
    text_field: str = Field(
        default="text",
        min_length=1,
        description="The field of JSON, or the column of CSV and Parquet, that holds the text.",
    )
    format: InputFormat | None = Field(
        default=None,
        description="The format of all files of `source`: plain `text`, JSON lines (`jsonl`), a JSON array "
        "(`json`), `csv` or `tsv` with a row of names, or `parquet`. null: of each file as its content and "
        "its name show it; one that may be read in two ways is an error.",
    )
    on_error: OnError = Field(
        default="stop",
        description="Rows that cannot be read (not JSON, not UTF-8, without the field or with something else "
        "in it): `stop` at the first, or `skip` and count them, up to a tenth of a file's rows.",
    )
    chat: Literal["assistant", "all"] | None = Field(
        default=None,
        description="The rows of JSON or Parquet are conversations: `messages` with roles, or `prompt` and "
        "`completion`. The loss counts the tokens of the `assistant`, or `all`. null: the source is text.",
    )
    chat_template: str | None = Field(
        default=None,
        description="With `chat`: a file with a Jinja template, or the name of one of the tokenizer's; null: "
        "the tokenizer's own.",
    )
    packing: Packing | None = Field(
        default=None,
        description="What fills a sample. `stream`: documents one after another, and attention crosses them. "
        "`documents`: the same, but attention stays inside each, positions begin anew, and no token is "
        "predicted from those of another document. `none`: one document, padded or cut to `sequence`. null: "
        "`stream` for text, `none` for conversations.",
    )
    too_long: Literal["truncate", "drop"] = Field(
        default="truncate",
        description="With `packing: none`, what becomes of documents longer than `sequence`: the end is cut "
        "off, or they are left out.",
    )
    objective: Objective | None = Field(
        default=None,
        description="What is predicted. `causal`: each next token. For an encoder-decoder, which reads "
        "windows of the text with spans cut out: `span-corruption`, the spans, each of which leaves a "
        "sentinel in the encoder's input (T5), or `infilling`, the whole text, of which each span leaves a "
        "mask (BART). null: `span-corruption` with an encoder, `causal` without.",
    )
    noise_density: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="The part of the text that is cut out; null: 0.15 for `span-corruption`, 0.3 for "
        "`infilling`.",
    )
    mean_span_length: float = Field(
        default=3.0, ge=1, description="Mean length of the spans that are cut out, in tokens."
    )
    sentinels: int | None = Field(
        default=None,
        gt=0,
        description="Entries that the vocabulary has for sentinels or the mask beside the tokenizer's, where "
        "`model.vocab` is null and the tokenizer has none of them; null: 100 for `span-corruption`, 1 for "
        "`infilling`.",
    )
    first_sentinel: int | None = Field(
        default=None,
        ge=0,
        description="The id of the first span's sentinel, from which those of later spans count down, or of "
        "the mask; null: the tokenizer's (`<extra_id_0>`, `<mask>`), else the last of the vocabulary.",
    )
    split: str = Field(
        default="949,50,1",
        pattern=r"^\s*\d+(\.\d+)?(\s*,\s*\d+(\.\d+)?){2}\s*$",
        examples=["949,50,1"],
        description="Ratio of training, evaluation and test text: three numbers.",
    )
    sequence: int = Field(
        default=128, gt=0, description="Tokens of a sample; of a model with an encoder, those that it reads."
    )
    target_sequence: int | None = Field(
        default=None,
        gt=0,
        description="Tokens of the decoder's sample of a model with an encoder; null: as many as the "
        "objective makes.",
    )
    shuffle: Literal["global", "window"] | None = Field(
        default=None,
        description="The order of the samples of an epoch. `global`: any may come next. `window`: runs of "
        "neighbouring samples are shuffled, then the samples of 64 runs at a time, so that every part of a "
        "source is read within one stretch of the epoch. null: `window` for sources at URLs, `global` for "
        "others.",
    )
    shuffle_window: int = Field(
        default=1 << 29, gt=0, description="Tokens that are shuffled at a time with `shuffle: window`."
    )
    cache: str | None = Field(
        default=None,
        description="Folder that keeps tokenizers, token files and blocks of sources at URLs; null: the "
        "user's cache folder.",
    )
    cache_gib: float = Field(
        default=16.0,
        gt=0,
        description="Disk space that blocks of sources at URLs may take in `cache` on each machine, GiB; the "
        "longest unused are dropped first.",
    )

    def density(self, corruption: Corruption) -> float:
        """The part of the text that an objective cuts out."""
        return USUAL_DENSITY[corruption] if self.noise_density is None else self.noise_density

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
