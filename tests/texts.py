"""The text of a config, tokenised, and its samples, as a run reads them."""

from __future__ import annotations

from stretto.run.config import TrainConfig
from stretto.run.data.mixture import HeldOut, TrainingSamples, held_out, training_samples
from stretto.run.data.prepare import describe_samples, prepare_data
from stretto.run.data.sentinels import job_of_text
from stretto.run.data.token_source import TokenData
from stretto.run.train.banner import banner


def open_tokens(config: TrainConfig) -> TokenData:
    return prepare_data(config.data, config.model.vocab, quiet=True)


def read_samples(source: TokenData, config: TrainConfig) -> TrainingSamples:
    return training_samples(source, config.data, job_of_text(config, source), config.train.seed)


def read_held_out(source: TokenData, config: TrainConfig, split: str = "valid") -> list[HeldOut]:
    return held_out(source, config.data, job_of_text(config, source), split)


def banner_of(source: TokenData, config: TrainConfig) -> str:
    job, folder = job_of_text(config, source), config.run.folder
    return banner(job, source, data=config.data, train=config.train, evaluation=config.eval, folder=folder)


def describe(source: TokenData, config: TrainConfig) -> list[str]:
    job, train = job_of_text(config, source), config.train
    evaluates = config.eval.every is not None
    return describe_samples(source, config.data, job, train.seed, steps=train.steps, evaluates=evaluates)
