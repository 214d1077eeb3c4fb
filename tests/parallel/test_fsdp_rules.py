"""Which ways of calling a model's parts are refused before it is sharded, and what to do about each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.distributed.gradients import whole_gradients
from trainer.config.sections import ParallelConfig, TrainConfig
from trainer.distributed.world import World
from trainer.parallel.fsdp_rules import Watch, entries, weight_problems
from trainer.parallel.mesh import device_mesh
from trainer.parallel.parallelize import ShardSpec, blocks_of, parallelize

WIDTH = 8


class Layer(nn.Module):
    """Two entry points that share nothing but weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).relu()

    def forward_train(self, x: Tensor) -> Tensor:
        return x + self.inner(x).relu()


class Dispatching(Layer):
    """As the layers of BAGEL's public code: one entry point calls the other."""

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_train(x)


class ByName(Layer):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = getattr(self, "forward_train")(x)  # noqa: B009
        return found


class ByWay(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.chosen(x)

    def chosen(self, x: Tensor) -> Tensor:
        return self.forward_train(x)


class ByTable(Layer):
    """No reader of its code can tell."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mode()(x)

    def mode(self) -> Callable[[Tensor], Tensor]:
        found: Callable[[Tensor], Tensor] = getattr(self, MODES["train"])
        return found


MODES = {"train": "forward_train"}


class Model(nn.Module):
    """Layers, and an embedding and a head that belong to the model's own group."""

    def __init__(self, kind: type[Layer] = Layer) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.embed(x), "__call__")

    def run(self, x: Tensor, method: str) -> Tensor:
        for layer in self.layers:
            x = getattr(layer, method)(x)
        return x @ self.embed.weight

    def through_methods(self, x: Tensor) -> Tensor:
        return self.run(self.embed(x), "forward_train")


def made(kind: type[Layer] = Layer) -> Model:
    torch.manual_seed(0)
    return Model(kind)


def inputs() -> Tensor:
    return torch.ones(2, WIDTH)


def refusal(model: Model, run: Callable[[Model], object], methods: Sequence[str] = ()) -> list[str]:
    """What is refused of it; nothing where all is accepted."""
    units = blocks_of(model, [type(model.layers[0]).__name__])
    watch = Watch(model, units)
    with watch.doors(entries(model, units, methods)), watch:
        run(model)
    return watch.problems


def nested(kind: type[Layer]) -> str:
    return (
        f"ShardSpec.methods: {kind.__name__}.forward calls {kind.__name__}.forward_train, which is also listed: its "
        "weights would be gathered and freed twice, one inside the other, and backward would find them freed; call the "
        "module itself and leave 'forward_train' out"
    )


@pytest.mark.parametrize("kind", [Dispatching, ByName, ByWay])
def test_a_method_that_forward_calls_is_refused_before_anything_is_sharded(kind: type[Layer]) -> None:
    with pytest.raises(ValueError) as caught:
        parallelize(
            made(kind),
            ShardSpec((kind.__name__,), (f"{kind.__name__}.forward_train",)),
            TrainConfig(),
            ParallelConfig(),
            "none",
            None,
        )
    assert str(caught.value) == nested(kind)


def test_one_that_forward_finds_in_a_table_is_refused_when_it_is_called() -> None:
    found = refusal(made(ByTable), lambda model: model(inputs()), ["ByTable.forward_train"])
    assert found == [nested(ByTable)]


def test_a_method_of_another_object_may_have_the_same_name() -> None:
    class Outer(Model):
        def forward(self, x: Tensor) -> Tensor:
            first: Any = self.layers[0]
            return first.through_methods(x)

        def through_methods(self, x: Tensor) -> Tensor:
            return x

    outer = Outer()
    assert entries(outer, [], ["through_methods"]) == [(outer, "through_methods")]


@pytest.mark.parametrize(("method", "owner"), [("encode", "Model"), ("Layer.encode", "Layer"), ("Lair.encode", "Lair")])
def test_a_method_that_no_module_has_is_refused_by_name(method: str, owner: str) -> None:
    model = made()
    with pytest.raises(ValueError) as caught:
        entries(model, list(model.layers), [method])
    assert str(caught.value) == (
        f"ShardSpec.methods: '{method}' is not a method of {owner}, or no sharded block is of that kind"
    )


def twice(model: Model) -> Tensor:
    return model(inputs()) + model(inputs())


@pytest.mark.parametrize(
    ("run", "methods"),
    [
        (lambda model: model(inputs()), []),
        (twice, []),
        (lambda model: model.through_methods(inputs()), ["through_methods", "Layer.forward_train"]),
    ],
)
def test_a_model_that_is_entered_through_its_doors_is_accepted(
    run: Callable[[Model], object], methods: list[str]
) -> None:
    assert refusal(made(), run, methods) == []


def test_the_check_leaves_the_model_as_it_was() -> None:
    model = made()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    refusal(model, lambda model: model(inputs()), ["through_methods"])
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_it_needs_no_memory() -> None:
    with torch.device("meta"):
        model = Model()
        assert refusal(model, lambda model: model(inputs())) == []


OUTSIDE = (
    "is used while {}, whose weights are gathered only then, does not run; use it inside, call the module itself, or "
    "list the method in ShardSpec.methods"
)


def test_a_layer_entered_by_a_method_that_is_not_listed_is_refused() -> None:
    found = refusal(made(), lambda model: model.through_methods(inputs()), ["through_methods"])
    assert found == [
        f"layers.{number}.inner.weight {OUTSIDE.format(f'layers.{number} (Layer)')}" for number in range(2)
    ]


def test_a_model_entered_by_a_method_that_is_not_listed_is_refused() -> None:
    found = refusal(made(), lambda model: model.through_methods(inputs()), ["Layer.forward_train"])
    past = "is called past the model, which gathers its own weights first and sets FSDP2 up; call the model, and the "
    assert found == [
        f"embed.weight {OUTSIDE.format('Model')}",
        f"layers.0 (Layer) {past}block inside its forward",
        f"layers.1 (Layer) {past}block inside its forward",
    ]


def test_a_layer_called_past_the_model_is_refused() -> None:
    assert refusal(made(), lambda model: model.layers[1](inputs())) == [
        "layers.1 (Layer) is called past the model, which gathers its own weights first and sets FSDP2 up; "
        "call the model, and the block inside its forward"
    ]


def test_a_weight_of_a_layer_that_other_code_reads_is_refused() -> None:
    def regularized(model: Model) -> Tensor:
        layer: Any = model.layers[0]
        return model(inputs()).sum() + layer.inner.weight.square().sum()

    assert refusal(made(), regularized) == [f"layers.0.inner.weight {OUTSIDE.format('layers.0 (Layer)')}"]


class View(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:1]


class Stashing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept


class Caching(Layer):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        found = super().forward(x)
        cache.keys.append(found)
        return found


class Cache:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []


def first_layer(kind: type[Layer], *arguments: Any) -> tuple[Model, Callable[[Model], object]]:
    """A model that gives its first layer the arguments besides, and makes nothing of what comes out."""

    class First(Model):
        def forward(self, x: Tensor) -> Tensor:
            self.layers[0](self.embed(x), *arguments)
            return x

    return First(kind), lambda model: model(inputs())


@pytest.mark.parametrize(("kind", "arguments"), [(View, ()), (Stashing, ()), (Caching, (Cache(),))])
def test_of_an_unknown_model_an_output_that_may_do_no_harm_is_accepted(
    kind: type[Layer], arguments: tuple[Any, ...]
) -> None:
    model, run = first_layer(kind, *arguments)
    assert weight_problems(model, blocks_of(model, [kind.__name__]), lambda: run(model)) == []


def test_of_an_unknown_model_a_weight_that_other_code_reads_is_found() -> None:
    model = made()
    layer: Any = model.layers[0]
    found = weight_problems(model, list(model.layers), lambda: model(inputs()).sum() + layer.inner.weight.sum())
    assert found == [f"layers.0.inner.weight {OUTSIDE.format('layers.0 (Layer)')}"]


def test_of_an_unknown_model_blocks_inside_blocks_are_found() -> None:
    model = made()
    units = blocks_of(model, ["Layer", "Linear"])
    assert weight_problems(model, units, lambda: model(inputs())) == ["a Linear is inside a Layer, and both are blocks"]


def test_tensors_without_values_are_zeros_to_code_that_asks_for_them() -> None:
    with torch.device("meta"):
        model = made()
        assert weight_problems(model, list(model.layers), lambda: model(inputs() * inputs().sum().item())) == []


def gradients(model: nn.Module, run: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    run(model).square().sum().backward()
    return whole_gradients(model)


def entered(model: Any) -> Tensor:
    found: Tensor = model.through_methods(inputs())
    return found


def sharded_gradients(world: World, strategy: Any) -> dict[str, Tensor]:
    parallel = ParallelConfig(devices=world.size, strategy=strategy)
    mesh = device_mesh(parallel, world, strategy)
    spec = ShardSpec(("Layer",), ("through_methods", "Layer.forward_train"))
    model = parallelize(made(), spec, TrainConfig(precision="fp32"), parallel, strategy, mesh)
    return gradients(model, entered)


@pytest.mark.parametrize("strategy", ["full", "grad_op"])
def test_listed_methods_of_the_model_and_of_its_layers_give_the_gradients_of_one_process(strategy: str) -> None:
    expected = gradients(made(), entered)
    for found in run_ranks(2, sharded_gradients, strategy):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], atol=0, rtol=1e-6)
