"""Plans of networks: against every combination, and the splits that papers found best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.autosplit.costs import Machine, SplitCosts, conversion_calls
from stretto.autosplit.network import Choice, Operator, OperatorGraph, Product, Split
from stretto.autosplit.plan import SplitPlan, plan_splits
from stretto.autosplit.solver import Cost
from stretto.errors import StrettoError
from stretto.planner.machines.catalogue import find_cluster


def machine(ranks: int, cluster: str = "a100", **more: int) -> Machine:
    return Machine(cluster=find_cluster(cluster, ranks), ranks=ranks, precision="fp32", **more)


class Build:
    """A chain of operators, as tracing would describe them."""

    def __init__(self, batch: int, *image: int) -> None:
        x = Operator(
            name="x", kind="input", inputs=(), shape=(batch, *image), splits=("whole",), gradient=False
        )
        self.operators = [x]

    @property
    def last(self) -> Operator:
        return self.operators[-1]

    def add(
        self, name: str, kind: str, shape: tuple[int, ...], inputs: tuple[str, ...] = (), **more: Any
    ) -> str:
        fields: dict[str, Any] = {"saved": 4.0 * prod(shape), "moved": 8.0 * prod(shape), **more}
        read = inputs or (self.last.name,)
        self.operators.append(Operator(name=name, kind=kind, inputs=read, shape=shape, **fields))
        return name

    def conv(self, name: str, channels: int, kernel: int, side: int, inputs: tuple[str, ...] = ()) -> str:
        read = (
            self.last
            if not inputs
            else next(operator for operator in self.operators if operator.name == inputs[0])
        )
        batch, before = read.shape[:2]
        return self.add(
            name,
            "Conv2d",
            (batch, channels, side, side),
            inputs,
            styles=("replicate", "batch"),
            weight=before * channels * kernel**2,
            bias=channels,
            moved=0.0,
            product=Product(batch * side * side, before * kernel**2, channels),
        )

    def follow(self, name: str, side: int | None = None) -> str:
        batch, channels, *image = self.last.shape
        shape = (batch, channels, *(side for _ in image)) if side else self.last.shape
        splits: tuple[Split, ...] = ("whole", "batch") if image else ("whole", "batch", "features")
        return self.add(name, "MaxPool2d" if side else "ReLU", shape, splits=splits)

    def flatten(self, name: str = "flatten") -> str:
        batch, *rest = self.last.shape
        return self.add(name, "flatten", (batch, prod(rest)), saved=0.0, moved=0.0)

    def linear(self, name: str, features: int) -> str:
        batch, before = self.last.shape
        return self.add(
            name,
            "Linear",
            (batch, features),
            styles=("replicate", "batch", "column", "row"),
            splits=("whole", "batch", "features"),
            weight=before * features,
            bias=features,
            moved=0.0,
            product=Product(batch, before, features),
            module=name,
        )

    def network(self) -> OperatorGraph:
        shape = self.last.shape
        self.add("output", "output", shape, splits=("whole",), saved=0.0, moved=0.0)
        return OperatorGraph(tuple(self.operators))


def alexnet(batch: int) -> OperatorGraph:
    """The widths of Krizhevsky 2014, as torchvision has them."""
    net = Build(batch, 3, 224, 224)
    for at, (channels, kernel, side, pooled) in enumerate(
        [(64, 11, 55, 27), (192, 5, 27, 13), (384, 3, 13, 0), (256, 3, 13, 0), (256, 3, 13, 6)], 1
    ):
        net.conv(f"conv{at}", channels, kernel, side)
        net.follow(f"relu{at}")
        if pooled:
            net.follow(f"pool{at}", pooled)
    net.flatten()
    for at, features in enumerate((4096, 4096, 1000), 6):
        net.linear(f"fc{at}", features)
        if features == 4096:
            net.follow(f"relu{at}")
    return net.network()


def vgg16(batch: int) -> OperatorGraph:
    """Simonyan & Zisserman 2015, configuration D."""
    net = Build(batch, 3, 224, 224)
    at, side = 0, 224
    for channels, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            at += 1
            net.conv(f"conv{at}", channels, 3, side)
            net.follow(f"relu{at}")
        side //= 2
        net.follow(f"pool{at}", side)
    net.flatten()
    for number, features in enumerate((4096, 4096, 1000), 1):
        net.linear(f"fc{number}", features)
        if features == 4096:
            net.follow(f"relu fc{number}")
    return net.network()


def resnet(batch: int, blocks: int = 8) -> OperatorGraph:
    """Basic blocks with shortcuts (He et al. 2016), and one small linear layer."""
    net = Build(batch, 3, 56, 56)
    net.conv("stem", 64, 3, 56)
    before = net.follow("relu")
    for at in range(blocks):
        net.conv(f"{at}.one", 64, 3, 56, (before,))
        net.follow(f"{at}.relu")
        inner = net.conv(f"{at}.two", 64, 3, 56)
        net.add(f"{at}.add", "add", net.last.shape, (inner, before))
        before = net.follow(f"{at}.out")
    net.follow("pool", 1)
    net.flatten()
    net.linear("fc", 1000)
    return net.network()


def styles(plan: SplitPlan) -> dict[str, str]:
    return {name: str(choice.style) for name, choice in plan.styles.items()}


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("cluster", ["a100", "v100-32gb-pcie"])
@pytest.mark.parametrize("make", [alexnet, vgg16])
def test_convolutions_by_batch_and_wide_linear_layers_by_features(
    ranks: int, cluster: str, make: Callable[[int], OperatorGraph]
) -> None:
    """Krizhevsky 2014: by batch what has most of the computation and few parameters, and the reverse."""
    plan = plan_splits(make(64 * ranks), machine(ranks, cluster))
    linear = {name: style for name, style in styles(plan).items() if name.startswith("fc")}
    assert {style for name, style in styles(plan).items() if name not in linear} == {"batch"}
    assert set(linear.values()) == {"column", "row"}
    for rule in ("data parallel", "tensor parallel", "replicated"):
        other = plan.rules[rule]
        assert other is not None
        assert plan.cost.seconds < other.seconds
    assert plan.rules["one weird trick"] == plan.cost


@pytest.mark.parametrize("ranks", [4, 8])
def test_networks_with_small_linear_layers_are_data_parallel(ranks: int) -> None:
    plan = plan_splits(resnet(256 * ranks), machine(ranks))
    assert set(styles(plan).values()) == {"batch"}
    assert plan.rules["data parallel"] == plan.cost


def test_one_rank_has_nothing_to_exchange() -> None:
    plan = plan_splits(alexnet(4), machine(1))
    assert plan.sent == 0.0
    assert plan.cost.seconds == pytest.approx(plan.parts["compute"])
    assert len({cost and cost.seconds for cost in plan.rules.values()}) == 1


SHAPES = st.lists(st.sampled_from(("conv", "follow", "add")), max_size=2)
LINEAR = st.lists(st.sampled_from((8, 10, 512, 4096)), min_size=1, max_size=2)


@settings(max_examples=25, deadline=None)
@given(
    image=SHAPES,
    linear=LINEAR,
    batch=st.sampled_from((8, 96)),
    share=st.floats(0.4, 1.1),
    ranks=st.sampled_from((2, 4)),
)
def test_plans_equal_brute_force(
    image: list[str], linear: list[int], batch: int, share: float, ranks: int
) -> None:
    """Every combination of choices, priced from the plan's own lines and conversions."""
    net = Build(batch, 3, 14, 14)
    before = net.conv("conv", 16, 3, 14)
    for at, kind in enumerate(image):
        if kind == "conv":
            before = net.conv(f"conv{at}", 16, 3, 14)
        elif kind == "follow":
            before = net.follow(f"relu{at}")
        else:
            net.conv(f"inner{at}", 16, 3, 14)
            before = net.add(f"add{at}", "add", net.last.shape, (net.last.name, before))
    net.flatten()
    for at, features in enumerate(linear):
        net.linear(f"fc{at}", features)
    network, on = net.network(), machine(ranks, "v100-32gb-pcie")
    prices = SplitCosts(network, on)
    costs = [
        cost
        for some in product(*network.choices(ranks))
        if (cost := total_cost(prices, dict(zip(prices.by_name, some, strict=True)))) is not None
    ]
    free = plan_splits(network, on)
    assert free.cost.seconds == pytest.approx(min(cost.seconds for cost in costs), rel=1e-12)
    assert free.cost == pytest.approx(
        total_cost(prices, {line.operator.name: line.choice for line in free.lines})
    )
    assert sum(free.parts.values()) == pytest.approx(free.cost.seconds)
    limit = share * free.cost.bytes
    fitting = [cost.seconds for cost in costs if cost.bytes <= limit]
    if not fitting:
        with pytest.raises(StrettoError, match="no split fits"):
            plan_splits(network, on, limit)
        return
    tight = plan_splits(network, on, limit)
    assert tight.cost.seconds == pytest.approx(min(fitting), rel=1e-12)
    assert tight.cost.bytes <= limit


def total_cost(prices: SplitCosts, choices: Mapping[str, Choice]) -> Cost | None:
    """Time and memory of one combination; None: it is impossible."""
    seconds = size = 0.0
    for operator in prices.network.operators:
        parts: list[Cost | None] = [prices.node(operator, choices[operator.name])]
        for name in dict.fromkeys(operator.inputs):
            parts.append(prices.edge(prices.by_name[name], choices[name], operator, choices[operator.name]))
        for part in parts:
            if part is None:
                return None
            seconds, size = seconds + part.seconds, size + part.bytes
    return Cost(seconds, size)


def test_layers_too_large_to_replicate_are_split() -> None:
    """Three samples a rank, for which data parallelism is best where it fits: 411 M parameters of a linear
    layer take 6.1 GiB with gradients and Adam's states.
    """
    net = Build(12, 3, 224, 224)
    net.conv("conv", 64, 3, 224)
    net.follow("pool", 14)
    net.flatten()
    net.linear("wide", 32768)
    net.linear("narrow", 10)
    network, on = net.network(), machine(4)
    room = plan_splits(network, on, 64 * 2**30)
    tight = plan_splits(network, on, 3 * 2**30)
    assert tight.cost.bytes <= 3 * 2**30
    assert styles(tight)["wide"] in ("column", "row")
    replicated = tight.rules["replicated"]
    assert replicated is not None
    assert replicated.bytes > 6 * 2**30
    assert room.cost.seconds <= tight.cost.seconds
    with pytest.raises(StrettoError, match=r"no split fits: a rank needs at least 1\.\d\d GiB"):
        plan_splits(network, on, 2**30)


def test_memory_of_a_rank_by_hand() -> None:
    """4 ranks; 16 bytes of weight, gradient and Adam's states for each parameter; activations of 4 bytes."""
    net = Build(8, 16)
    net.linear("first", 32)
    net.linear("second", 64)
    network, on = net.network(), machine(4)
    prices = SplitCosts(network, on)
    first, second = (prices.by_name[name] for name in ("first", "second"))
    batch, column, row = (
        Choice("batch", "batch", "batch", "batch"),
        Choice("column", "whole", "features", "features"),
        Choice("row", "features", "whole", "whole"),
    )
    assert prices.node(first, batch).bytes == 16 * (16 * 32 + 32) + 4 * 2 * 32
    assert prices.node(second, column).bytes == 16 * (32 * 64 + 64) / 4 + 4 * 8 * 16
    assert prices.node(second, row).bytes == 16 * (32 * 64 / 4 + 64) + 4 * 8 * 64
    conversions = [prices.edge(first, batch, second, after) for after in (batch, column, row)]
    assert [cost and cost.bytes for cost in conversions] == [0, 4 * 8 * 32, 4 * 8 * 8]
    plan = plan_splits(network, on, fix={"first": "batch", "second": "column"})
    parts = (prices.node(first, batch), prices.node(second, column), conversions[1])
    assert plan.cost.bytes == sum(cost.bytes for cost in parts if cost)


def test_tied_layers_are_split_alike() -> None:
    net = Build(64, 512)
    net.linear("first", 4096)
    net.linear("second", 4096)
    free = plan_splits(OperatorGraph(net.network().operators), machine(4, "v100-32gb-pcie"))
    assert styles(free)["first"] != styles(free)["second"]
    tied = plan_splits(
        OperatorGraph(tuple(net.operators), ties=(("first", "second"),)), machine(4, "v100-32gb-pcie")
    )
    assert styles(tied)["first"] == styles(tied)["second"]


def test_functions_convert_nothing() -> None:
    """An addition of a linear layer's output to what is before it: the layer converts its output itself."""
    net = Build(64, 4096)
    before = net.linear("first", 4096)
    net.linear("second", 4096)
    net.add("add", "add", net.last.shape, (net.last.name, before), splits=("whole", "batch", "features"))
    net.linear("last", 4096)
    plan = plan_splits(net.network(), machine(4, "v100-32gb-pcie"))
    chosen = {line.operator.name: line.choice for line in plan.lines}
    assert chosen["add"].takes == chosen["first"].output == chosen["second"].output


@pytest.mark.parametrize(
    ("before", "after", "partial", "sent"),
    [
        ("batch", "whole", False, [("all-gather", 75)]),
        ("batch", "whole", True, [("all-gather", 75), ("reduce-scatter", 75)]),
        ("whole", "batch", False, [("all-gather", 75)]),
        ("features", "whole", False, [("all-gather", 75)]),
        ("features", "whole", True, [("all-gather", 75), ("reduce-scatter", 75)]),
        ("whole", "features", False, [("all-gather", 75)]),
        ("batch", "features", False, [("all-to-all", 18.75), ("all-to-all", 18.75)]),
        ("features", "batch", False, [("all-to-all", 18.75), ("all-to-all", 18.75)]),
        ("whole", "whole", True, [("all-reduce", 150)]),
        ("whole", "whole", False, []),
    ],
)
def test_what_conversions_send(
    before: Split, after: Split, partial: bool, sent: list[tuple[str, float]]
) -> None:
    """100 bytes over 4 ranks; without a gradient, the forward's."""
    some = conversion_calls(before, after, 100, 4, gradient=True, partial=partial)
    assert [(message.kind, message.sent(4)) for message in some] == sent
    forward = conversion_calls(before, after, 100, 4, gradient=False, partial=partial)
    assert forward == (() if before == "whole" else some[:1])


def test_impossible_networks_say_why() -> None:
    net = Build(6, 8)
    net.add("view", "view", (6, 8), splits=("batch",))
    with pytest.raises(StrettoError, match=r"view \(view\) cannot be split over 4 ranks"):
        plan_splits(net.network(), machine(4))
    net = Build(8, 8)
    net.add("view", "view", (8, 8), splits=("batch",))
    with pytest.raises(StrettoError, match="no combination of splits suits"):
        plan_splits(net.network(), machine(4))
