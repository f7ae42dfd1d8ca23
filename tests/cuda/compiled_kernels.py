"""Compile the framework's compiled functions and FlexAttention to machine code of GPUs that are absent.

Functions are traced on the meta device, where autograd runs without a driver, and their graphs are moved to
`cuda` before inductor's passes. From there inductor, Triton and ptxas do what they do on a machine with that
GPU: they see its properties, and a kernel whose shared memory exceeds the GPU's is refused, as the driver
refuses it. Nothing is launched, so nothing is tuned: all configurations between which inductor would choose
by time are compiled.

    python tests/cuda/compiled_kernels.py sm_90                          # JSON, one list of kernels per case
    python tests/cuda/compiled_kernels.py sm_80 sm_90 sm_100 --table     # the tables of docs/evidence/gpu.md
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

LAUNCHED = list[int]()  # kernels of each call of a compiled graph
CUDA, META = torch.device("cuda", 0), torch.device("meta")


@dataclass(frozen=True)
class Chip:
    """The properties of a GPU that decide what is compiled; shared memory in bytes per thread block."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared: int

    @property
    def arch(self) -> int:
        return 10 * self.capability[0] + self.capability[1]

    def properties(self) -> SimpleNamespace:
        """Return what `torch.cuda.get_device_properties` has of such a GPU and inductor asks for."""
        return SimpleNamespace(
            name=self.name,
            major=self.capability[0],
            minor=self.capability[1],
            multi_processor_count=self.multiprocessors,
            warp_size=32,
            regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=2048,
            max_threads_per_block=1024,
            shared_memory_per_block=48 << 10,
            shared_memory_per_block_optin=self.shared,
        )


# multiprocessors: data sheets (A100 SXM, H100 SXM, B200); shared memory: CUDA C++ Programming Guide, table of
# technical specifications, 163 KB for 8.0, 99 KB for 8.9, 227 KB for 9.0 and 10.0
CHIPS = {
    "sm_80": Chip("A100", (8, 0), 108, 163 << 10),
    "sm_90": Chip("H100", (9, 0), 132, 227 << 10),
    "sm_100": Chip("B200", (10, 0), 148, 227 << 10),
    "sm_89": Chip("L40S", (8, 9), 142, 99 << 10),
}


@dataclass
class Kernel:
    """A Triton kernel that inductor would launch.

    Attributes:
        configs: [warps, stages, registers per thread, bytes of stack (spilled registers), shared bytes] of
            each compiled configuration that the GPU accepts.
        refused: the same of those whose shared memory does not fit.
    """

    name: str
    configs: list[list[int]] = field(default_factory=list[list[int]])
    refused: list[list[int]] = field(default_factory=list[list[int]])


def resources(cubin: bytes) -> tuple[int, int]:
    """Return registers per thread, and bytes of stack per thread, of the one kernel of a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert len(found) == 1, text
    registers, stack, local = map(int, found[0])
    return registers, stack + local


@contextmanager
def in_place_of(chip: Chip, kernels: list[Kernel]) -> Generator[None]:
    """Let torch and Triton compile for `chip` until the end of the `with`, and add each kernel to `kernels`.

    Torch caches answers about its device for the life of a process, so a process compiles for one chip.
    """
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import compile_fx, config
    from torch._inductor.runtime import triton_heuristics
    from torch._subclasses import fake_tensor
    from triton.backends import Backend, backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime.errors import OutOfResources

    properties = chip.properties()

    class Driver:
        utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": chip.shared})

        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", chip.arch, 32)

    def make_launcher(result: Any) -> Any:
        compiled, config = result.kernel, result.config
        registers, stack = resources(compiled.asm["cubin"])
        shared = compiled.metadata.shared
        if not kernels or kernels[-1].name != compiled.metadata.name:
            kernels.append(Kernel(compiled.metadata.name))
        row = [compiled.metadata.num_warps, config.num_stages, registers, stack, shared]
        if shared > chip.shared:
            kernels[-1].refused.append(row)
            raise OutOfResources(shared, chip.shared, "shared memory")
        kernels[-1].configs.append(row)
        return SimpleNamespace(config=config, n_regs=registers, n_spills=stack // 4, shared=shared)

    def cuda_passes(graph: Any, skip_invoke_subgraph: bool = False, input_device: Any = None) -> Any:
        _move(graph, CUDA)
        # patterns of attention, which no compiled function contains, would be traced with values on a GPU
        return passes(graph, skip_invoke_subgraph, torch.device("cpu"))

    passes = compile_fx._recursive_joint_graph_passes
    nothing = lambda *_: None  # noqa: E731
    torch._C._ensureCUDADeviceGuardSet()
    with ExitStack() as stack:
        answers: list[tuple[Any, dict[str, Any]]] = [
            (
                torch.cuda,
                {
                    "is_available": lambda: True,
                    "device_count": lambda: 1,
                    "current_device": lambda: 0,
                    "get_device_properties": lambda _=None: properties,
                    "get_device_capability": lambda _=None: chip.capability,
                    "is_bf16_supported": lambda including_emulation=True: True,
                    "_lazy_init": nothing,
                    "_exchange_device": lambda _: 0,
                    "_maybe_exchange_device": lambda _: 0,
                    "synchronize": nothing,
                    "get_rng_state": lambda *_: torch.zeros(8, dtype=torch.uint8),
                    "set_rng_state": nothing,
                },
            ),
            (
                CudaInterface,
                {
                    "current_device": staticmethod(lambda: 0),
                    "device_count": staticmethod(lambda: 1),
                    "get_device_properties": staticmethod(lambda _=None: properties),
                    "is_bf16_supported": staticmethod(lambda including_emulation=False: True),
                    "exchange_device": staticmethod(lambda _: 0),
                    "maybe_exchange_device": staticmethod(lambda _: 0),
                    "get_raw_stream": staticmethod(lambda _: 0),
                },
            ),
            (torch.accelerator, {"is_available": lambda: False}),
            (fake_tensor, {"init_gpu_context": nothing}),
            (compile_fx, {"_recursive_joint_graph_passes": cuda_passes}),
            (triton_heuristics.TritonCompileResult, {"make_launcher": make_launcher}),
        ]
        for owner, values in answers:
            stack.enter_context(mock.patch.multiple(owner, **values))
        nvidia = Backend(backends["nvidia"].compiler, Driver)  # pyright: ignore[reportArgumentType]
        stack.enter_context(mock.patch.dict(backends, nvidia=nvidia))
        stack.callback(setattr, triton.runtime.driver, "_active", triton.runtime.driver._active)
        triton.runtime.driver.set_active(Driver())  # pyright: ignore[reportArgumentType]
        settings: Any = config.patch(
            force_disable_caches=True, use_static_triton_launcher=False, compile_threads=1
        )
        stack.enter_context(settings)
        yield


def backend(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend of `torch.compile`: inductor's, whose result returns tensors of the meta device."""
    from torch._inductor import compile_fx
    from torch._inductor.graph import GraphLowering

    def compile_graph(traced: Any, examples: Sequence[Any], **options: Any) -> Callable[..., Any]:
        sources = list[str]()
        on_meta = copy.deepcopy(traced)
        _move(on_meta, META)
        with mock.patch.object(GraphLowering, "save_output_code", sources.append):
            compile_fx.compile_fx_inner(traced, [_moved(x) for x in examples], **options)
        launches = len(re.findall(r"^ +triton_\w+\.run\(", sources[-1], re.MULTILINE))
        assert not re.search(r"^ .*extern_kernels\.\w+\(", sources[-1], re.MULTILINE), sources[-1]
        outputs = next(node for node in traced.graph.nodes if node.op == "output").args[0]
        values = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in outputs]
        symbolic = any(isinstance(n, torch.SymInt) for v in values if isinstance(v, Tensor) for n in v.shape)

        def call(arguments: list[Any]) -> Any:
            LAUNCHED.append(launches)
            given = list(arguments)
            arguments.clear()
            if symbolic:
                with _disable_current_modes():
                    return on_meta(*given)
            return [
                torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=META)
                if isinstance(v, Tensor)
                else v
                for v in values
            ]

        call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return call

    return compile_fx.compile_fx(graph, inputs, inner_compile=compile_graph)  # pyright: ignore


def _moved(value: Any) -> Any:
    """A fake tensor on the meta device as one on `cuda`."""
    from torch._subclasses import FakeTensor

    if not isinstance(value, FakeTensor) or value.device != META:
        return value
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)


def _move(module: Any, device: torch.device) -> None:
    """Move a graph and those inside it: arguments that are devices, and, to `cuda`, recorded values."""

    def other(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    for graph in module.modules():
        if isinstance(graph, torch.fx.GraphModule):
            for node in graph.graph.nodes:
                node.args = torch.fx.node.map_aggregate(node.args, other)
                node.kwargs = torch.fx.node.map_aggregate(node.kwargs, other)
                if device == CUDA and "val" in node.meta:
                    node.meta["val"] = tree_map(_moved, node.meta["val"])
            graph.recompile()


# ------------------------------------------------------------------ what is compiled

SEQUENCE = 4096
BLOCKS = {
    "GPT": "gpt3-5b",
    "Llama 3": "llama3-8b",
    "Qwen 3": "qwen3-8b",
    "Gemma 2": "gemma2-9b",
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Scores:
    """A case of FlexAttention; `heads`: of queries and of keys, `widths`: of keys and of values."""

    heads: tuple[int, int]
    widths: tuple[int, int]
    dtype: str = "bf16"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    documents: bool = False
    positions: int = SEQUENCE


FLEX = {
    "Mistral, window": Scores((32, 8), (128, 128), window=1024),
    "Llama 3, documents": Scores((32, 8), (128, 128), documents=True),
    "Gemma 2, soft cap": Scores((16, 8), (256, 256), softcap=50.0),
    "Gemma 2, soft cap and window": Scores((16, 8), (256, 256), window=1024, softcap=50.0),
    "gpt-oss, sinks and window": Scores((64, 8), (64, 64), window=128, sinks=True),
    "DeepSeek-V3, documents": Scores((128, 128), (192, 128), documents=True),
    "float32, documents": Scores((32, 8), (128, 128), "fp32", documents=True),
    "float32, soft cap": Scores((16, 8), (256, 256), "fp32", softcap=50.0),
}


@contextmanager
def kernels_of_cuda() -> Generator[None]:
    """Call the fused operators that torch selects on CUDA and composes of others on the meta device."""
    from stretto.engine.models import causal

    def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        return torch.ops.aten._fused_rms_norm(x, list(shape), weight, eps)[0]

    def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, **_: Any) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[0]

    def attention(self: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        return attend(q, k, v, scale=1.0)

    with (
        mock.patch.object(torch.nn.functional, "rms_norm", rms_norm),
        mock.patch.object(causal.CausalAttention, "forward", attention),
    ):
        yield


class Launches(TorchDispatchMode):
    """Counts calls of operators that launch kernels, all but views and allocations."""

    count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func._schema.name not in _SILENT:
            self.count += 1
        return func(*args, **kwargs or {})


_SILENT = {
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach")
} | {"aten::_unsafe_view", "aten::_reshape_alias", "aten::promote_types"}


def block(name: str, dtype: str, compiler: Any) -> int:
    """Run forward and backward of a block of the preset on a sample; return the number of launches, with
    those of compiled functions, which `backend` counts in `LAUNCHED`.
    """
    from stretto.engine.models.build import build
    from stretto.engine.models.compiled import compile_blocks
    from stretto.engine.parallel.tensor.norm import use_memory_efficient_norms
    from stretto.job.presets import preset

    shape = replace(preset(BLOCKS[name]), layers=1, sequence=SEQUENCE, vocab=256, dropout=0.0)
    with META:
        model = build(shape).to(DTYPES[dtype])
    use_memory_efficient_norms(model)
    if compiler is not None:
        compile_blocks(model, compiler)
    layer = model.blocks[0]
    x = torch.empty(1, SEQUENCE, shape.hidden, dtype=DTYPES[dtype], device=META, requires_grad=True)
    with kernels_of_cuda():
        layer(x).backward(torch.empty_like(x))  # compiles, and computes the tables of rotary positions
        x.grad = None
        layer.zero_grad()
        LAUNCHED.clear()
        with Launches() as launches:
            layer(x).backward(torch.empty_like(x))
    return launches.count + sum(LAUNCHED)


def experts() -> dict[str, Any]:
    """Run the activation of routed experts, whose number of rows varies."""
    from stretto.engine.compiler import Compiler
    from stretto.engine.models.mlp import activate

    compiler = Compiler(backend)  # pyright: ignore[reportArgumentType]
    for rows in (1000, 1010):
        y = torch.empty(rows, 2 * 14336, dtype=torch.bfloat16, device=META, requires_grad=True)
        z = compiler(activate, dynamic=True)(y, "swiglu")
        z.backward(torch.empty_like(z))
    compiler.close()
    return {"graphs": dict(compiler.graphs)}


def scores(case: Scores) -> None:
    """Run forward and backward of FlexAttention."""
    from stretto.engine import flex
    from stretto.engine.documents import DocumentStarts
    from stretto.engine.kernels import ScoreOptions

    (heads, kv_heads), (d, dv) = case.heads, case.widths
    sizes = ((heads, d), (kv_heads, d), (kv_heads, dv))
    q, k, v = (
        torch.empty(1, h, case.positions, w, dtype=DTYPES[case.dtype], device=META, requires_grad=True)
        for h, w in sizes
    )
    sinks = torch.empty(heads, dtype=DTYPES[case.dtype], device=META, requires_grad=True)
    starts = torch.zeros(1, case.positions, dtype=torch.int64)
    starts[:, case.positions // 2 :] = case.positions // 2
    y = flex.attend(
        q,
        k,
        v,
        ScoreOptions(d**-0.5, case.softcap, case.window),
        sinks=sinks if case.sinks else None,
        documents=DocumentStarts(starts) if case.documents else None,
    )
    y.backward(torch.empty_like(y))


def _any_device(*_: Tensor) -> None:
    """FlexAttention's refusals of devices, of which the meta device is one; a mock would not be traced."""


Report = dict[str, dict[str, Any]]


def compile_all(chip: Chip, wanted: Callable[[str], bool]) -> Report:
    """Compile the cases whose names are `wanted`; return for each its kernels, or the error, and for a block
    the launches of forward and backward without and with `train.compile=blocks`.
    """
    from stretto.engine import flex
    from stretto.engine.compiler import Compiler

    report, kernels = Report(), list[Kernel]()

    def case(name: str, run: Callable[[], dict[str, Any]]) -> None:
        if not wanted(name):
            return
        first = len(kernels)
        try:
            report[name] = run()
        except Exception as error:  # any error of the compiler is a result
            report[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
        report[name]["kernels"] = [asdict(kernel) for kernel in kernels[first:]]
        print(f"{chip.name}: {name}", file=sys.stderr)

    def fused(name: str, dtype: str) -> dict[str, Any]:
        plain = block(name, dtype, None)
        compiler = Compiler(backend)  # pyright: ignore[reportArgumentType]
        try:
            return {"plain": plain, "fused": block(name, dtype, compiler), "graphs": dict(compiler.graphs)}
        finally:
            compiler.close()

    def attention(of: Scores) -> dict[str, Any]:
        scores(of)
        return {}

    with (
        in_place_of(chip, kernels),
        mock.patch.object(flex.compiler, "BACKEND", backend),
        mock.patch.object(flex, "compute_capability", return_value=chip.capability),
        mock.patch("torch.nn.attention.flex_attention._validate_device", new=_any_device),
        redirect_stdout(sys.stderr),
    ):
        for name in BLOCKS:
            for dtype in DTYPES if name == "Llama 3" else ("bf16",):
                case(f"{name}, {dtype}", partial(fused, name, dtype))
        case("Mixtral, routed experts", experts)
        for name, of in FLEX.items():
            case(name, partial(attention, of))
    return report


def table(reports: dict[str, Report]) -> str:
    """The Markdown of the reports by chip."""
    header = "| compiled | launches | " + " | ".join(CHIPS[chip].name for chip in reports) + " |"
    lines = [header, "|---" * (2 + len(reports)) + "|"]
    for name, first in next(iter(reports.values())).items():
        launches = f"{first['plain']} → {first['fused']}" if "plain" in first else ""
        cells = [_cell(report[name]) for report in reports.values()]
        lines.append(f"| {name} | {launches} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(result: dict[str, Any]) -> str:
    """Number of kernels, and the largest registers, spills and shared memory among them, of each kernel's
    configuration that spills least.
    """
    if "error" in result:
        return result["error"].partition("\n")[0][:60]
    rows = [best(kernel) for kernel in result["kernels"]]
    registers, stack, shared = (max(column) for column in zip(*(row[2:] for row in rows), strict=True))
    return f"{len(rows)}: {registers}, {stack}, {shared / 1024:.1f}"


def best(kernel: dict[str, Any]) -> list[int]:
    """The configuration of a kernel that spills least."""
    return min(kernel["configs"], key=lambda row: (row[3], row[2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("chips", nargs="+", choices=list(CHIPS))
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name it matches")
    parser.add_argument("--table", action="store_true", help="print the table of docs/evidence/gpu.md")
    options = parser.parse_args()
    if not options.table:
        (chip,) = options.chips
        json.dump(compile_all(CHIPS[chip], lambda name: bool(re.search(options.only, name))), sys.stdout)
        return
    reports = dict[str, Report]()
    for chip in options.chips:  # torch knows one device in a process
        command = [sys.executable, __file__, chip, "--only", options.only]
        reports[chip] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(table(reports))


if __name__ == "__main__":
    main()
