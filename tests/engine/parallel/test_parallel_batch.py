"""Splits that change from layer to layer: every rank's loss, gradients and statistics are one process's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_mesh import FakeMesh
from torch import Tensor, nn

from ranks import on_ranks
from stretto import (
    BatchParallel,
    ColumnParallel,
    GatherBatch,
    Layout,
    Mesh,
    Replicate,
    RowParallel,
    data_parallel,
    parallelize,
    sum_gradients,
)
from stretto.engine.parallel.late import delay_messages
from stretto.engine.parallel.styles import ParallelStyle
from stretto.engine.parallel.tensor.dropout import DropoutKeys, key_dropout
from stretto.engine.parallel.tensor.rounds import InRounds
from stretto.engine.parallel.traffic import traffic
from stretto.errors import StrettoError

RANKS, SAMPLES, CLASSES = 3, 18, 5
FEW_DIGITS = 1e-12


class Net(nn.Module):
    """Convolutions, statistics over the batch, dropout in both halves, and a parameter used by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.3), nn.MaxPool2d(2)
        )
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(54, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 6), nn.Tanh()
        )
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.classifier(self.features(x) * self.scale))


def net_plan(gather: ParallelStyle) -> dict[str, ParallelStyle]:
    return {
        "": BatchParallel(),
        "features": BatchParallel(),
        "classifier": gather,
        "classifier.1": ColumnParallel(),
        "classifier.4": RowParallel(),
        "head": Replicate(),
    }


def keyed(model: nn.Module) -> nn.Module:
    keys = DropoutKeys(3)
    keys.samples = range(100, 100 + SAMPLES)
    key_dropout(model, keys)
    return model


def net() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = keyed(Net().double())
    x = torch.randn(SAMPLES, 2, 8, 8, dtype=torch.float64, requires_grad=True)
    return model, x, torch.randint(CLASSES, (SAMPLES,))


def gap(computed: Tensor, reference: Tensor) -> float:
    return float(
        (computed.detach() - reference.detach()).abs().max() / reference.detach().abs().max().clamp(1e-9)
    )


def gradient_gap(model: nn.Module, table: Any, plain: nn.Module) -> float:
    """The largest relative difference of the gradients held here."""
    return max(
        gap(piece.of_local(parameter.grad), piece.of_full(plain.get_parameter(name).grad))
        for name, parameter in model.named_parameters()
        for piece in table[name].placed.pieces
    )


# ---------------------------------------------------------------------- on ranks


def _schedules() -> dict[str, float]:
    mesh, gaps = Mesh(Layout(tp=RANKS)), {}
    plain, x, y = net()
    expected = plain(x)
    F.cross_entropy(expected, y).backward()
    for schedule, late in product(("all", "turns", "shares"), (False, True)):
        model, mine, y = net()
        table = parallelize(model, net_plan(GatherBatch(schedule)), mesh)
        if late:
            with delay_messages(seed=mesh.rank) as slow:
                output = model(mine)
                F.cross_entropy(output, y).backward()
                sum_gradients(model, table)
            assert not slow.broken, slow.broken
        else:
            output = model(mine)
            F.cross_entropy(output, y).backward()
            sum_gradients(model, table)
        name = f"{schedule}{' late' * late}"
        gaps[f"{name} output"] = gap(output, expected)
        gaps[f"{name} input gradient"] = gap(mine.grad, x.grad)
        gaps[f"{name} gradients"] = gradient_gap(model, table, plain)
        norm, reference = model.features[1], plain.features[1]
        gaps[f"{name} running mean"] = gap(norm.running_mean, reference.running_mean)
        gaps[f"{name} running variance"] = gap(norm.running_var, reference.running_var)
        with torch.no_grad():
            again = copy.deepcopy(plain).eval()(x)
            gaps[f"{name} evaluation"] = gap(model.eval()(mine), again)
    return gaps


def test_each_schedule_of_the_gather_equals_one_process():
    for gaps in on_ranks(RANKS, _schedules):
        assert len(gaps) == 36
        assert max(gaps.values()) < FEW_DIGITS, gaps


STYLES: tuple[Callable[[], ParallelStyle], ...] = (Replicate, BatchParallel, ColumnParallel, RowParallel)


def _chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 9), nn.Dropout(0.4), nn.Linear(9, 12), nn.GELU(), nn.Linear(12, 6), nn.Softmax(-1)
    ).double()


def _chains(every: bool) -> dict[str, float]:
    """Styles for each of three layers, every choice or as many that every split changes into every other."""
    mesh, gaps = Mesh(Layout(tp=RANKS)), {}
    plain = keyed(_chain())
    x = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = torch.arange(6.0, dtype=torch.float64)
    plain_x = x.clone().requires_grad_()
    expected = plain(plain_x)
    (expected * weights).sum().backward()
    chosen = product(range(len(STYLES)), repeat=3)
    for kinds in ([STYLES[at] for at in c] for c in chosen if every or c[2] == sum(c[:2]) % len(STYLES)):
        model, mine = keyed(_chain()), x.clone().requires_grad_()
        plan = {name: kind() for name, kind in zip(("0", "2", "4"), kinds, strict=True)}
        table = parallelize(model, plan, mesh, convert=True)
        output = model(mine)
        (output * weights).sum().backward()
        sum_gradients(model, table)
        gaps[" ".join(kind.__name__ for kind in kinds)] = max(
            gap(output, expected), gap(mine.grad, plain_x.grad), gradient_gap(model, table, plain)
        )
    return gaps


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_any_style_may_follow_any_other(every: bool):
    for gaps in on_ranks(RANKS, _chains, every):
        assert len(gaps) == (64 if every else 16)
        assert max(gaps.values()) < FEW_DIGITS, {name: g for name, g in gaps.items() if g >= FEW_DIGITS}


def _gathered() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(9, 12), nn.Dropout(0.4), nn.Linear(12, 6), nn.Tanh())
    return nn.Sequential(nn.Linear(6, 9), inner).double()


def _inside(every: bool) -> dict[str, float]:
    """Every style for each of two layers inside of what is gathered, by `every` schedule or them in turn."""
    mesh, gaps = Mesh(Layout(tp=RANKS)), {}
    x = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = keyed(_gathered())
    expected = plain(x)
    expected.square().sum().backward()
    pairs, schedules = product(STYLES, repeat=2), ("all", "turns", "shares")
    chosen = [
        (*pair, s) for at, pair in enumerate(pairs) for s in (schedules if every else schedules[at % 3 :][:1])
    ]
    for first, second, schedule in chosen:
        model = keyed(_gathered())
        plan = {"0": BatchParallel(), "1": GatherBatch(schedule), "1.0": first(), "1.2": second()}
        table = parallelize(model, plan, mesh)
        output = model(x)
        output.square().sum().backward()
        sum_gradients(model, table)
        gaps[f"{first.__name__} {second.__name__} {schedule}"] = max(
            gap(output, expected), gradient_gap(model, table, plain)
        )
    return gaps


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_of_any_style_may_be_inside_of_what_is_gathered(every: bool):
    for gaps in on_ranks(RANKS, _inside, every):
        assert len(gaps) == (48 if every else 16)
        assert max(gaps.values()) < FEW_DIGITS, {name: g for name, g in gaps.items() if g >= FEW_DIGITS}


def _rows() -> dict[str, Any]:
    """Each rank is called with its own rows, and has its own rows of the output and its term of the loss; a
    residual connection; and styles that say their splits themselves.
    """
    mesh, found = Mesh(Layout(tp=RANKS)), {}
    mine = slice(mesh.rank * SAMPLES // RANKS, (mesh.rank + 1) * SAMPLES // RANKS)
    plain, x, y = net()
    F.cross_entropy(plain(x), y).backward()
    model, rows, y = net()
    table = parallelize(model, net_plan(GatherBatch("turns")), mesh, inputs="batch", outputs="batch")
    (F.cross_entropy(model(rows[mine]), y[mine], reduction="sum") / SAMPLES).backward()
    sum_gradients(model, table)
    found["rows"] = gradient_gap(model, table, plain)

    plan = {"up": ColumnParallel(), "down": RowParallel(output="batch"), "out": BatchParallel()}
    for name, styles, how in (
        ("residual", plan, {"convert": True}),
        (
            "declared",
            {
                "up": ColumnParallel(input="batch"),
                "down": RowParallel(output="batch"),
                "out": BatchParallel(output="whole"),
                "norm": BatchParallel(input="whole"),
            },
            {"convert": False},
        ),
    ):
        torch.manual_seed(1)
        plain = Residual().double()
        model, x = copy.deepcopy(plain), torch.randn(SAMPLES, 6, dtype=torch.float64)
        plain(x).square().mean().backward()
        table = parallelize(model, {"norm": BatchParallel(), **styles}, mesh, **how)
        model(x).square().mean().backward()
        sum_gradients(model, table)
        found[name] = gradient_gap(model, table, plain)
    return found


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.up, self.down, self.out = nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.out(x + self.down(F.gelu(self.up(x))))


def test_rows_residuals_and_declared_splits_equal_one_process():
    for found in on_ranks(RANKS, _rows):
        assert max(found.values()) < FEW_DIGITS, found


def _rounds() -> dict[str, Any]:
    mesh, found = Mesh(Layout(tp=RANKS)), {}
    for schedule, update in product(("turns", "shares"), (False, True)):
        plain, x, y = net()
        model, mine, y = net()
        table = parallelize(model, net_plan(GatherBatch(schedule)), mesh, inputs="batch")
        of_rank = slice(mesh.rank * SAMPLES // RANKS, (mesh.rank + 1) * SAMPLES // RANKS)
        losses = list[float]()
        classifier = model.classifier
        optimizer = torch.optim.SGD(classifier.parameters(), lr=0.1, momentum=0.9)
        events = list[str]()
        classifier[1].register_forward_hook(lambda *_, to=events: to.append("computed"))
        rows = list[Tensor]()
        with traffic(lambda _, kind, __, to=events: to.append(kind)):
            for round_rows in classifier.rounds(model.features(mine[of_rank]) * model.scale):
                loss = F.cross_entropy(model.head(round_rows.output), y[round_rows.rows]) / round_rows.rounds
                loss.backward()
                rows.append(round_rows.rows)
                losses.append(float(loss.detach()))
                if update:
                    optimizer.step()
                    optimizer.zero_grad()
        sum_gradients(model, table)
        # one process: the same rounds, one after another, and the convolutions' backward after the last
        h = plain.features(x) * plain.scale
        leaf, expected = h.detach().requires_grad_(), list[float]()
        plain_optimizer = torch.optim.SGD(plain.classifier.parameters(), lr=0.1, momentum=0.9)
        keys = plain.classifier[3].keys
        for some in rows:
            keys.samples = (some + 100).tolist()
            loss = F.cross_entropy(plain.head(plain.classifier(leaf[some])), y[some]) / RANKS
            loss.backward()
            expected.append(float(loss.detach()))
            if update:
                plain_optimizer.step()
                plain_optimizer.zero_grad()
        h.backward(leaf.grad)
        name = f"{schedule}{' updated' * update}"
        found[f"{name} losses"] = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        found[f"{name} weights"] = max(
            gap(piece.of_local(parameter), piece.of_full(plain.get_parameter(name)))
            for name, parameter in model.named_parameters()
            for piece in table[name].placed.pieces
        )
        compared = [
            (name, p)
            for name, p in model.named_parameters()
            if not (update and name.startswith("classifier"))
        ]
        found[f"{name} gradients"] = max(
            gap(piece.of_local(p.grad), piece.of_full(plain.get_parameter(name).grad))
            for name, p in compared
            for piece in table[name].placed.pieces
        )
        assert sorted(torch.cat(rows).tolist()) == list(range(SAMPLES))
        if not update:  # without rounds one process comes to the same
            again, x, y = net()
            F.cross_entropy(again(x), y).backward()
            found[f"{name} whole"] = gradient_gap(model, table, again)
        found[f"{name} order"] = events
    return found


def test_rounds_of_forward_and_backward_equal_one_process_and_gather_ahead():
    for found in on_ranks(RANKS, _rounds):
        numbers = {name: number for name, number in found.items() if isinstance(number, float)}
        assert len(numbers) == 14
        assert max(numbers.values()) < FEW_DIGITS, numbers
        for schedule, sent, returned in (
            ("turns", "broadcast", "reduce"),
            ("shares", "all-gather", "reduce-scatter"),
        ):
            order = [event for event in found[f"{schedule} order"] if event in (sent, returned, "computed")]
            order = order[1 * (schedule == "shares") :]  # without the gather of BatchNorm's statistics
            first, *others = [sent, sent, "computed"], [returned, sent, "computed"], [returned, "computed"]
            assert order == [*first, *others[0], *others[1], returned], order


def _bytes() -> dict[str, Any]:
    mesh = Mesh(Layout(tp=RANKS))
    x, sent = torch.randn(SAMPLES, 6, dtype=torch.float64), {}
    for name, plan in (
        ("batch to column", {"0": BatchParallel(), "2": ColumnParallel(), "4": RowParallel()}),
        ("batch", {"": BatchParallel()}),
    ):
        model = keyed(_chain())
        table = parallelize(model, plan, mesh)
        with traffic() as counted:
            model(x).sum().backward()
            sum_gradients(model, table)
        sent[name] = dict(counted.bytes)
    return sent


def test_a_gather_before_a_column_is_a_reduce_scatter_backward():
    (sent, *_) = on_ranks(RANKS, _bytes)
    others = RANKS - 1
    part = SAMPLES // RANKS * 9 * 8  # of the activations between the first two layers
    reduced = SAMPLES * 6 * 8, (6 * 9 + 9) * 8  # the last layer's output, the first layer's gradients
    assert sent["batch to column"] == {
        "all-gather": others * part,
        "reduce-scatter": others * part,
        "all-reduce": sum(2 * tensor_bytes * others // RANKS for tensor_bytes in reduced),
    }
    parameters = sum(p.numel() for p in _chain().parameters()) * 8
    assert sent["batch"] == {
        "all-gather": others * SAMPLES // RANKS * 6 * 8,
        "all-reduce": 2 * parameters * others // RANKS,
    }


def _norms() -> dict[str, float]:
    mesh, gaps = Mesh(Layout(tp=RANKS)), {}
    generator = torch.Generator().manual_seed(2)
    for norm, shape in (
        (nn.BatchNorm1d(4), (SAMPLES, 4)),
        (nn.BatchNorm1d(4, affine=False, momentum=None), (SAMPLES, 4, 3)),
        (nn.BatchNorm2d(4, track_running_stats=False), (SAMPLES, 4, 2, 2)),
        (nn.BatchNorm3d(4, momentum=0.3), (SAMPLES, 4, 1, 2, 2)),
    ):
        plain = nn.Sequential(norm.double())
        model = copy.deepcopy(plain)
        table = parallelize(model, {"0": BatchParallel()}, mesh)
        for _ in range(2):  # a mean far from zero, where sums of squares would cancel
            x = 1e6 + torch.randn(shape, dtype=torch.float64, generator=generator)
            plain_input, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
            weights = torch.randn(shape, dtype=torch.float64, generator=generator)
            plain.zero_grad()
            model.zero_grad()
            expected, output = plain(plain_input), model(mine)
            (expected * weights).sum().backward()
            (output * weights).sum().backward()
            sum_gradients(model, table)
        name = f"{type(norm).__name__} {tuple(shape)}"
        gaps[f"{name} output"] = gap(output, expected)
        gaps[f"{name} input gradient"] = gap(mine.grad, plain_input.grad)
        for (buffer, value), reference in zip(model.named_buffers(), plain.buffers(), strict=True):
            gaps[f"{name} {buffer}"] = gap(value.double(), reference.double())
        if norm.affine:
            gaps[f"{name} gradients"] = gradient_gap(model, table, plain)
    return gaps


def test_batch_norm_takes_statistics_over_all_ranks():
    for gaps in on_ranks(RANKS, _norms):
        assert len(gaps) == 20
        assert max(gaps.values()) < 1e-8, gaps  # values of 1e6 have ten digits left for what is around them


# ---------------------------------------------------------------------- without ranks


class Reduced(nn.Module):
    """A function over the samples between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


@pytest.mark.parametrize(
    ("function", "style", "says"),
    [
        (lambda x: x - x.mean(0), BatchParallel(), "mean.. in Reduced .* is over the samples of the batch"),
        (lambda x: x.sum(), BatchParallel(), "sum.. in Reduced"),
        (lambda x: x.t(), BatchParallel(), "t.. in Reduced"),
        (lambda x: x[0], BatchParallel(), "getitem.. in Reduced"),
        (lambda x: torch.cat([x, x]), BatchParallel(), "cat.. in Reduced"),
        (
            lambda x: torch.softmax(x, -1),
            ColumnParallel(),
            "softmax.. in Reduced .* called with a part of the features",
        ),
        (lambda x: x if x.sum() > 0 else -x, BatchParallel(), "cannot be traced"),
    ],
)
def test_functions_that_need_what_other_ranks_have_are_refused(function, style, says):
    with pytest.raises(StrettoError, match=says):
        parallelize(Reduced(function), {"a": style, "b": BatchParallel()}, FakeMesh(2), convert=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(-1, keepdim=True),
        lambda x: x.flatten(1).view(x.shape[0], -1)[:, ::1],
        lambda x: torch.cat(x.chunk(2, 1), dim=1),
        lambda x: torch.softmax(x, dim=-1).max(x),
    ],
)
def test_functions_of_each_sample_are_let_through(function):
    parallelize(Reduced(function), {"a": BatchParallel(), "b": BatchParallel()}, FakeMesh(2))


class Masked(nn.Module):
    """An argument that is left out in training."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        x = self.a(x) * scale
        return self.b(x if mask is None else x * mask)


def test_arguments_with_a_default_are_traced_with_it_and_refused_otherwise():
    model = Masked()
    parallelize(model, {"a": BatchParallel(), "b": BatchParallel()}, FakeMesh(2))
    model(torch.zeros(4, 6), scale=1.0)
    for how in ({"mask": torch.ones(6)}, {"scale": 2.0}):
        with pytest.raises(StrettoError, match=r"Masked is called with .*, and was traced with"):
            model(torch.zeros(4, 6), **how)


def test_an_addition_of_different_splits_is_refused():
    plan: dict[str, ParallelStyle] = {
        "norm": BatchParallel(),
        "up": ColumnParallel(),
        "down": RowParallel(),
        "out": BatchParallel(),
    }
    with pytest.raises(StrettoError, match=r"add\(\) in Residual .*'return self.out.* batch and whole"):
        parallelize(Residual(), plan, FakeMesh(2))


def test_a_parameter_whose_gradient_would_be_counted_wrongly_is_refused():
    plan = net_plan(GatherBatch())
    with pytest.raises(StrettoError, match=r"uses a parameter on a part of the batch.*expects the whole"):
        parallelize(keyed(Net()), {**plan, "": Replicate()}, FakeMesh(2))


def test_missing_gradients_raise():
    model = keyed(_chain())
    table = parallelize(model, {"": BatchParallel()}, FakeMesh(2, grouped=True), convert=False)
    with pytest.raises(StrettoError, match="no parameter whose gradient must be summed has a grad"):
        sum_gradients(model, table)
    with pytest.raises(
        StrettoError, match=r"gradient of 0.weight must also be summed .* which zero1 does not"
    ):
        data_parallel(model, FakeMesh(2), "zero1")


def _copies() -> float:
    """Two copies of the ranks of tp, each with half of the batch."""
    mesh = Mesh(Layout(tp=2, dp=2))
    plain, model = _gathered(), _gathered()
    plain[1][1].p = model[1][1].p = 0.0
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plan = {"0": BatchParallel(), "1": GatherBatch("turns"), "1.0": ColumnParallel(), "1.2": RowParallel()}
    table = parallelize(model, plan, mesh)
    wrapped = data_parallel(
        model, mesh, "ddp", places={name: sharded.placed for name, sharded in table.items()}
    )
    wrapped(x.chunk(2)[mesh.index("dp")]).square().mean().backward()
    sum_gradients(model, table)
    plain(x).square().mean().backward()
    return gradient_gap(model, table, plain)


def test_a_part_of_the_batch_is_split_once_more_over_copies():
    assert max(on_ranks(4, _copies)) < FEW_DIGITS


def test_what_a_gather_cannot_do_is_refused():
    with pytest.raises(StrettoError, match="schedule is 'turn'"):
        GatherBatch("turn")  # pyright: ignore[reportArgumentType]
    model = nn.ModuleDict({"c": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))})
    with pytest.raises(StrettoError, match=r"'0.1' takes statistics over the batch.*a part in each round"):
        parallelize(nn.Sequential(model["c"]), {"0": GatherBatch("turns")}, FakeMesh(2))
    with pytest.raises(StrettoError, match="have to be traced"):
        parallelize(nn.Sequential(model["c"]), {"0": GatherBatch("all")}, FakeMesh(2), convert=False)
    with pytest.raises(StrettoError, match="takes batches along dimension 1"):
        parallelize(nn.Sequential(nn.GRU(4, 4)), {"0": BatchParallel()}, FakeMesh(2))


def _uneven() -> list[str]:
    """Errors of batches that do not divide, and of a round without a backward."""
    mesh, errors = Mesh(Layout(tp=2)), list[str]()
    model, x, _ = net()
    parallelize(model.eval(), net_plan(GatherBatch("shares")), mesh)
    for rows in (5, 6):
        with pytest.raises(StrettoError) as error:
            model(x[:rows])
        errors.append(str(error.value))
    classifier = model.classifier
    assert isinstance(classifier, InRounds)
    with pytest.raises(StrettoError) as error:
        for _ in classifier.rounds(torch.zeros(SAMPLES // 2 - 1, 6, 3, 3, dtype=torch.float64)):
            pass
    return [*errors, str(error.value)]


def test_batches_that_do_not_divide_and_rounds_without_a_backward_are_errors():
    for batch, share, backward in on_ranks(2, _uneven):
        assert "the batch of a tensor [5, 2, 8, 8] does not divide over 2 ranks" in batch
        assert "a rank's 3 samples do not divide into 2 shares" in share
        assert "round 0 of 2 had no backward" in backward
