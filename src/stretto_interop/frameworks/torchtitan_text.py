"""torchtitan's configs as text: Python that builds a `Trainer.Config` (0.3), and TOML (until 0.2), to and
from settings by dotted names. Python is read as it stands, by its syntax tree; nothing of it runs.
"""

from __future__ import annotations

import ast
import json
import operator
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from stretto.errors import StrettoError, nearest
from stretto_interop.frameworks.mapping import ParsedSettings, Settings, Start, Unset

# ------------------------------------------------------------------ a config function as a syntax tree


@dataclass(kw_only=True)
class ConfigCall:
    """A call that is not executed: its function and arguments.

    Attributes:
        name: as written, "TrainingConfig" or "FullAC.Config".
        module: that the name was imported from; "" if it was not.
        constants: values of the module's names in capitals.
    """

    name: str
    module: str = ""
    arguments: list[Any] = field(default_factory=list[Any])
    keywords: dict[str, Any] = field(default_factory=dict[str, Any])
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class FillIn:
    """A value that is still to be filled in."""


def read_config(text: str, source: str, *, returns: str) -> ConfigCall:
    """Return the call that the module's config function returns: the only one, or the last that no other
    uses.

    Args:
        returns: type that a config function returns, by its annotation or its last line.

    Raises:
        StrettoError: not Python, no such function or several, or code that would have to run; names the line.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise StrettoError(f"{source} line {error.lineno}: {error.msg}", hint="is it Python?") from None
    return _Reader(tree, source, returns).config()


_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}
_NUMBERS = (int, float)


class _Reader:
    def __init__(self, tree: ast.Module, source: str, returns: str) -> None:
        self._source, self._returns = source, returns
        self._functions = {
            statement.name: statement for statement in tree.body if isinstance(statement, ast.FunctionDef)
        }
        self._modules: dict[str, str] = {}
        self._constants: dict[str, Any] = {}
        self._depth = 0
        for statement in tree.body:
            if isinstance(statement, ast.ImportFrom):
                path = statement.module or source.replace("\\", "/").rpartition("/")[0].replace("/", ".")
                self._modules |= {name.asname or name.name: path for name in statement.names}
        for statement in tree.body:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if isinstance(statement, ast.Assign) and isinstance(target, ast.Name):
                try:
                    self._constants[target.id] = ast.literal_eval(statement.value)
                except ValueError:
                    continue  # nothing that a config can use

    def config(self) -> ConfigCall:
        configs = [statement for statement in self._functions.values() if self._is_config(statement)]
        used = {
            node.id for statement in configs for node in ast.walk(statement) if isinstance(node, ast.Name)
        }
        ends = [statement for statement in configs if statement.name not in used]
        if not ends:
            raise StrettoError(
                f"{self._source} has no function that returns {self._returns}",
                hint="is it a config of torchtitan?",
            )
        if len(ends) > 1:
            names = ", ".join(statement.name for statement in ends)
            raise StrettoError(
                f"{self._source} has {len(ends)} configs: {names}",
                hint="keep one of them in a file of its own",
            )
        value = self._run(ends[0])
        if not isinstance(value, ConfigCall) or not value.name.endswith(self._returns):
            raise self._cannot(ends[0], f"{ends[0].name} returns no {self._returns}")
        return value

    def _is_config(self, statement: ast.FunctionDef) -> bool:
        if statement.returns is not None:
            return ast.unparse(statement.returns).strip("'\"") == self._returns
        last = statement.body[-1]
        return isinstance(last, ast.Return) and self._returns in ast.unparse(last)

    def _cannot(self, node: ast.AST, problem: str) -> StrettoError:
        line = getattr(node, "lineno", 0)
        return StrettoError(
            f"{self._source} line {line}: {problem}, which cannot be read without running it",
            hint="write literal values and calls of config classes",
        )

    def _run(self, function: ast.FunctionDef) -> Any:
        """Return the value of a function without arguments."""
        self._depth += 1
        if self._depth > 20:
            raise self._cannot(function, f"{function.name} calls itself")
        names: dict[str, Any] = {}
        for statement in function.body:
            if isinstance(statement, ast.Return):
                self._depth -= 1
                return None if statement.value is None else self._value(statement.value, names)
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                self._assign(statement.targets[0], self._value(statement.value, names), names)
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                self._assign(statement.target, self._value(statement.value, names), names)
            elif not isinstance(statement, ast.Expr | ast.Assert | ast.ImportFrom | ast.Import | ast.Pass):
                raise self._cannot(statement, f"{function.name} has a {type(statement).__name__.lower()}")
            elif isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant):
                raise self._cannot(statement, f"{function.name} does something")
        raise self._cannot(function, f"{function.name} returns nothing")

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
            return
        if isinstance(target, ast.Attribute):
            inside = self._value(target.value, names)
            if isinstance(inside, ConfigCall):
                inside.keywords[target.attr] = value
                return
        raise self._cannot(target, f"an assignment to {ast.unparse(target)}")

    def _value(self, node: ast.expr, names: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id in names:
                return names[node.id]
            if node.id in self._constants:
                return self._constants[node.id]
            return ConfigCall(
                name=node.id, module=self._modules.get(node.id, "")
            )  # a function or class, handed on
        if isinstance(node, ast.List | ast.Tuple):
            items = [self._value(statement, names) for statement in node.elts]
            return tuple(items) if isinstance(node, ast.Tuple) else items
        if isinstance(node, ast.Dict):
            if None in node.keys:
                raise self._cannot(node, "a dict with ** in it")
            return {
                self._value(key, names): self._value(value, names)
                for key, value in zip(node.keys, node.values, strict=True)
                if key is not None  # for types
            }
        if isinstance(node, ast.Attribute):
            inside = self._value(node.value, names)
            if isinstance(inside, ConfigCall) and node.attr in inside.keywords:
                return inside.keywords[node.attr]
            return ConfigCall(name=ast.unparse(node))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._value(node.operand, names)
            if isinstance(value, _NUMBERS):
                return -value
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            left, right = self._value(node.left, names), self._value(node.right, names)
            if isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS):
                return _BINARY[type(node.op)](left, right)
        if isinstance(node, ast.Call):
            return self._call(node, names)
        return ConfigCall(name=ast.unparse(node))  # unknown, and refused where it matters

    def _call(self, node: ast.Call, names: Mapping[str, Any]) -> Any:
        name = ast.unparse(node.func)
        if name == "fill_in":
            return FillIn()
        if name == "schedule_file" and "SCHEDULE" in self._constants:
            return self._constants["SCHEDULE"]
        if any(statement.arg is None for statement in node.keywords):
            raise self._cannot(node, f"{name} with ** in it")
        arguments = [self._value(statement, names) for statement in node.args]
        keywords = {
            statement.arg: self._value(statement.value, names)
            for statement in node.keywords
            if statement.arg is not None
        }
        if name == "float" and arguments == ["inf"]:
            return float("inf")
        function = self._functions.get(name)
        if function is not None and self._is_config(function) and not arguments and not keywords:
            return self._run(function)
        module = self._modules.get(name.partition(".")[0], "")
        return ConfigCall(
            name=name, module=module, arguments=arguments, keywords=keywords, constants=self._constants
        )


FUNCTION = "planned"  # what `--config` of torchtitan then names

# ------------------------------------------------------------------ writing


def render(settings: Settings, notes: Sequence[str]) -> str:
    """Return a module with the config function `planned`, which stops at an undecided value with a
    message.
    """
    module = settings["model.name"]
    sizes = settings.get("model.sizes")
    csv = settings.get(_CSV)
    parts = [
        '"""'
        + "\n".join([*(note.replace("\\", "\\\\").replace('"""', "'''") for note in notes), "", *_USE])
        + '\n"""',
        "\n".join(_imports(settings)),
        "\n".join(_constants(settings)),
        *([_FILL_IN] if any(isinstance(value, Unset) for value in settings.values()) else []),
        *([_SCHEDULE_FILE] if csv else []),
        *([_SIZED] if sizes else []),
        _function(settings),
    ]
    assert module
    return "\n\n\n".join(part.strip("\n") for part in parts if part) + "\n"


_CSV = "parallelism.pipeline_parallel_schedule_csv"
_USE = (
    "A config of torchtitan 0.3.0: beside this file,",
    "    torchrun --nproc-per-node 8 -m torchtitan.train --module NAME_OF_THIS_FILE --config planned",
)
_FILL_IN = '''
def fill_in(field: str, example: object) -> NoReturn:
    """Stop at an undecided value."""
    raise SystemExit(f"{__file__}: fill in {field}, such as {example}")
'''
_SCHEDULE_FILE = '''
def schedule_file() -> str:
    """The schedule as a file, which is how torchtitan takes it."""
    with tempfile.NamedTemporaryFile("w", suffix=".csv", delete=False) as file:
        file.write(SCHEDULE)
    return file.name
'''
_SIZED = '''
def sized() -> ModelSpec:
    """The model of `SIZES`, built as torchtitan's own flavours are."""
    dim, vocab = SIZES["dim"], SIZES["vocab_size"]
    embedding = llama3._EMBEDDING_SKIP_INIT if SIZES["enable_weight_tying"] else llama3._EMBEDDING_INIT
    layers = llama3._build_llama3_layers(
        n_layers=SIZES["n_layers"],
        dim=dim,
        n_heads=SIZES["n_heads"],
        n_kv_heads=SIZES["n_kv_heads"],
        hidden_dim=SIZES["hidden_dim"],
        rope=ComplexRoPE.Config(
            dim=dim // SIZES["n_heads"],
            max_seq_len=SIZES["max_seq_len"],
            theta=SIZES["theta"],
            scaling="none",
        ),
        attn_backend="flex",
    )
    model = llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=vocab,
        enable_weight_tying=SIZES["enable_weight_tying"],
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=embedding),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=dim, out_features=vocab, param_init=llama3._output_linear_init(dim)
        ),
        layers=layers,
    )
    return dataclasses.replace(model_registry("debugmodel"), flavor="planned", model=model)
'''


def _imports(settings: Settings) -> list[str]:
    module, sizes = settings["model.name"], settings.get("model.sizes")
    open_ = any(isinstance(value, Unset) for value in settings.values())
    debug = "DebugConfig, " if "debug.seed" in settings else ""
    lines = [
        *(["import dataclasses"] if sizes else []),
        *(["import tempfile"] if settings.get(_CSV) else []),
        *(["from typing import NoReturn"] if open_ else []),
        "",
        "from torchtitan.components.checkpointer import CheckpointManager",
        "from torchtitan.components.loss import CrossEntropyLoss",
        *(
            ["from torchtitan.components.metrics import MetricsProcessor"]
            if "metrics.log_freq" in settings
            else []
        ),
        "from torchtitan.components.optimizer import (",
        *(f"    {name}," for name in ("LRSchedulersContainer", "OptimizersContainer", "ParamGroupConfig")),
        ")",
        *(
            ["from torchtitan.components.quantization import Float8LinearConverter"]
            if settings.get("model.float8")
            else []
        ),
        f"from torchtitan.config import {debug}ParallelismConfig, TrainingConfig",
        *(
            ["from torchtitan.distributed.activation_checkpoint import FullAC"]
            if settings["activation_checkpoint.mode"] == "full"
            else []
        ),
        "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader",
        *(["from torchtitan.models import llama3"] if sizes else []),
        *(["from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm"] if sizes else []),
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        f"from torchtitan.models.{module} import model_registry",
        *(["from torchtitan.protocols.model_spec import ModelSpec"] if sizes else []),
        "from torchtitan.trainer import Trainer",
    ]
    return lines[1:] if not lines[0] else lines


def _constants(settings: Settings) -> list[str]:
    lines = [
        'TOKENIZER = "./tests/assets/tokenizer"  # folder of a tokenizer of Hugging Face',
        'DATASET = "c4_test"  # a name that torchtitan.hf_datasets knows',
    ]
    sizes = settings.get("model.sizes")
    if sizes:
        lines += ["SIZES = {", *(f"    {json.dumps(name)}: {value!r}," for name, value in sizes.items()), "}"]
    if settings.get(_CSV):
        lines += ['SCHEDULE = """\\', settings[_CSV].rstrip("\n"), '"""']
    return lines


_SECTIONS = {
    "training": "TrainingConfig",
    "parallelism": "ParallelismConfig",
    "lr_scheduler": "LRSchedulersContainer.Config",
    "checkpoint": "CheckpointManager.Config",
    "metrics": "MetricsProcessor.Config",
    "debug": "DebugConfig",
}


def _function(settings: Settings) -> str:
    lines = [
        f"def {FUNCTION}() -> Trainer.Config:",
        f"    model_spec = {_model(settings)}",
        "    return Trainer.Config(",
        "        model_spec=model_spec,",
        "        hf_assets_path=TOKENIZER,",
        "        dataloader=HuggingFaceTextDataLoader.Config(dataset=DATASET),",
        "        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),",
        *_optimizer(settings),
    ]
    for section, kind in _SECTIONS.items():
        inside = {n.partition(".")[2]: v for n, v in settings.items() if n.startswith(f"{section}.")}
        if not inside:
            continue
        lines.append(f"        {section}={kind}(")
        for name, value in inside.items():
            shown = "schedule_file()" if f"{section}.{name}" == _CSV else _python(value, 12)
            lines.append(f"            {name}={shown},")
        lines.append("        ),")
    again = "FullAC.Config()" if settings["activation_checkpoint.mode"] == "full" else "None"
    return "\n".join([*lines, f"        activation_checkpoint={again},", "    )"])


def _model(settings: Settings) -> str:
    if settings.get("model.sizes"):
        return "sized()"
    eight = settings.get("model.float8")
    converters = (
        f', converters=[Float8LinearConverter.Config(recipe_name="{eight}", filter_fqns=["lm_head"])]'
        if eight
        else ""
    )
    return f"model_registry({json.dumps(settings['model.flavor'])}{converters})"


def _optimizer(settings: Settings) -> list[str]:
    """Return the lines of a group of norms and biases, without weight decay, and of one of all other
    parameters.
    """
    of = {name.partition(".")[2]: value for name, value in settings.items() if name.startswith("optimizer.")}
    decay = of["weight_decay"]
    groups = [("norm|bias", 0.0), (".*", decay)] if decay else [(".*", 0.0)]
    betas = f"({of['beta1']!r}, {of['beta2']!r})"
    lines = ["        optimizer=OptimizersContainer.Config(", "            param_groups=["]
    for pattern, weight_decay in groups:
        lines += [
            "                ParamGroupConfig(",
            f"                    pattern={json.dumps(pattern)},",
            f"                    optimizer_name={json.dumps(of['name'])},",
            "                    optimizer_kwargs={",
            f'                        "lr": {_python(of["lr"], 0)},',
            f'                        "betas": {betas},',
            f'                        "eps": {of["eps"]!r},',
            f'                        "weight_decay": {weight_decay!r},',
            "                    },",
            "                ),",
        ]
    return [
        *lines,
        "            ],",
        f"            implementation={json.dumps(of['implementation'])},",
        "        ),",
    ]


def _python(value: Any, indent: int) -> str:
    """Format a value as Python source."""
    if isinstance(value, Unset):
        return f'fill_in("{value.name}", {value.example!r})'
    if value == inf:
        return 'float("inf")'
    if isinstance(value, list) and value and isinstance(value[0], list):
        inner = " " * (indent + 4)
        return "[\n" + "".join(f"{inner}{json.dumps(each)},\n" for each in value) + " " * indent + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


# ------------------------------------------------------------------ reading


def parse(text: str, source: str, start: Start) -> ParsedSettings:
    """Read the settings of a config function or of a TOML file, with the number of shards if it is left open.

    Raises:
        StrettoError: neither of them, code that would have to run, or an unknown number of devices.
    """
    settings = _from_toml(text, source) if source.endswith(".toml") else _from_python(text, source)
    names = ("_degree", "batch_size", "microbatch_size", ".seq_len", "layers_per_stage")
    for name, value in settings.items():
        if not name.endswith(names) or value is None:
            continue
        minimum = -1 if name.endswith(("shard_degree", "global_batch_size")) else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum or value == 0:
            raise StrettoError(f"{source}: {name} is {value!r}", hint="a whole number above 0")
    return ParsedSettings(settings=_sized(settings, source, start.devices))


# names of 0.1 and 0.2, by those of 0.3
_RENAMED = {
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_split_points": "parallelism.pipeline_parallel_split_points",
    "experimental.pipeline_parallel_microbatches": "parallelism.pipeline_parallel_microbatches",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "model.norm_type": "model.norm_type",
}


def _from_toml(text: str, source: str) -> dict[str, Any]:
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise StrettoError(f"{source}: {error}", hint="is it a TOML file of torchtitan?") from None
    settings: dict[str, Any] = {}
    for section, inside in tree.items():
        if not isinstance(inside, dict):
            raise StrettoError(f"{source}: {section} is no section", hint="as in [training]")
        for name, value in _flat(inside, f"{section}."):
            settings[_RENAMED.get(name, name)] = value
    converters = settings.pop("model.converters", [])
    named = [converters] if isinstance(converters, str) else list(converters)
    settings |= _converted({name: settings.get(f"{name}.recipe_name") for name in named if name}, source)
    return settings


def _flat(tree: Mapping[str, Any], before: str) -> list[tuple[str, Any]]:
    values = list[tuple[str, Any]]()
    for key, value in tree.items():
        values += _flat(value, f"{before}{key}.") if isinstance(value, dict) else [(f"{before}{key}", value)]
    return values


def _converted(converters: Mapping[str, str | None], source: str) -> dict[str, Any]:
    """Return the settings of converters by name, and their recipes; only 8-bit products have costs."""
    values: dict[Any, Any] = {}
    for name, recipe in converters.items():
        if not name.lower().startswith(("float8", "quantize.linear.float8")):
            raise StrettoError(f"{source}: converter {name} has no costs here", hint="what has: float8")
        values["model.float8"] = recipe or ("rowwise" if "Converter" in name else "tensorwise")
    return values


def _from_python(text: str, source: str) -> dict[str, Any]:
    config = read_config(text, source, returns="Trainer.Config")
    settings: dict[str, Any] = {}
    sections = {
        **dict.fromkeys(
            ("training", "parallelism", "lr_scheduler", "checkpoint", "metrics", "debug", "compile")
        ),
        **dict.fromkeys(("comm", "profiler", "validator", "dataloader", "tokenizer", "override")),
    }
    for name, value in config.keywords.items():
        if name in sections and isinstance(value, ConfigCall):
            settings |= {f"{name}.{key}": inner for key, inner in value.keywords.items()}
        elif name == "model_spec":
            settings |= _model_of(value, source)
        elif name == "optimizer":
            settings |= _optimizer_of(value, source)
        elif name == "activation_checkpoint":
            settings |= _recomputed(value, source)
        else:
            settings[name] = value.name if isinstance(value, ConfigCall) else value
    # of an expression that is no literal, its text
    return {
        name: value.name if isinstance(value, ConfigCall) else value
        for name, value in settings.items()
        if not isinstance(value, FillIn)
    }


def _model_of(value: Any, source: str) -> dict[str, Any]:
    if isinstance(value, ConfigCall) and value.name == "sized":
        return {"model.name": "llama3", "model.sizes": value.constants.get("SIZES", {})}
    if not isinstance(value, ConfigCall) or not value.name.endswith("model_registry"):
        raise StrettoError(
            f"{source}: model_spec is not made by model_registry", hint="say the model with --model"
        )
    module = value.module.rpartition("models.")[2].partition(".")[0]
    flavour = value.keywords.get("flavor", value.arguments[0] if value.arguments else None)
    converters = value.keywords.get("converters") or []
    named = {
        item.name: item.keywords.get("recipe_name") for item in converters if isinstance(item, ConfigCall)
    }
    return {"model.name": module, "model.flavor": flavour, **_converted(named, source)}


def _optimizer_of(value: Any, source: str) -> dict[str, Any]:
    """Return the group with most weight decay; all groups must have one optimiser."""
    if not isinstance(value, ConfigCall):
        return {}
    if value.name.endswith("default_adamw"):
        lr = {"lr": value.arguments[0]} if value.arguments else {}
        return _adamw("AdamW", {**lr, **value.keywords})
    values: dict[Any, Any] = {}
    groups = [item for item in value.keywords.get("param_groups", []) if isinstance(item, ConfigCall)]
    names = {item.keywords.get("optimizer_name") for item in groups}
    if len(names) > 1:
        raise StrettoError(
            f"{source}: several optimisers, {', '.join(sorted(map(str, names)))}", hint="AdamW alone"
        )
    for group in sorted(
        groups, key=lambda item: item.keywords.get("optimizer_kwargs", {}).get("weight_decay", 0)
    ):
        values |= _adamw(
            str(group.keywords.get("optimizer_name")), group.keywords.get("optimizer_kwargs", {})
        )
    if "implementation" in value.keywords:
        values["optimizer.implementation"] = value.keywords["implementation"]
    return values


def _adamw(name: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    values = {"optimizer.name": name} | {f"optimizer.{key}": value for key, value in keywords.items()}
    betas = values.pop("optimizer.betas", None)
    return values if betas is None else {**values, "optimizer.beta1": betas[0], "optimizer.beta2": betas[1]}


def _recomputed(value: Any, source: str) -> dict[str, Any]:
    modes = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
    name = (
        ""
        if value is None
        else value.name.removesuffix(".Config")
        if isinstance(value, ConfigCall)
        else str(value)
    )
    if value is not None and name not in modes:
        closest = nearest(name, modes)
        raise StrettoError(
            f"{source}: activation_checkpoint is {name}", hint=f"did you mean {closest}?" if closest else None
        )
    return {"activation_checkpoint.mode": modes.get(name, "none")}


def _sized(settings: dict[str, Any], source: str, devices: int | None) -> dict[str, Any]:
    """Add the number of shards, which torchtitan computes itself if it is left open."""

    def degree(name: str) -> int:
        return settings.get(f"parallelism.{name}_degree", 1)

    shard = settings.get("parallelism.data_parallel_shard_degree", -1)
    if shard > 0:
        return settings
    if devices is None:
        raise StrettoError(
            f"{source} does not say how many devices there are", hint="--cluster with :N, as in h100:64"
        )
    degrees = ("data_parallel_replicate", "tensor_parallel", "context_parallel", "pipeline_parallel")
    taken = 1
    for name in degrees:
        taken *= degree(name)
    shard, remainder = divmod(devices, taken)
    if remainder or not shard:
        raise StrettoError(
            f"{source}: {devices} devices are no multiple of the {taken} ranks of the other degrees",
            hint=f"nearest: {max(1, shard) * taken} devices",
        )
    return {**settings, "parallelism.data_parallel_shard_degree": shard}
