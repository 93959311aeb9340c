"""The parts of a step that need no other process: counts, keys of randomness, outputs, which parameters are trained."""

from __future__ import annotations

from dataclasses import replace

import handmade
import pytest
import torch
from torch import fx, nn

from tpcompile.collectives import mix
from tpcompile.errors import Refused, TpcompileError
from tpcompile.layout import TensorType, symbol
from tpcompile.mesh import Mesh
from tpcompile.runtime import outputs, step
from tpcompile.runtime.data_parallel import check_gradients, reached
from tpcompile.runtime.groups import Groups
from tpcompile.runtime.schedule import sizes_of
from tpcompile.runtime.stage import StageRoot
from tpcompile.timeline import shared_weights

ALONE = Groups(Mesh(), 0, torch.device("cpu"), None)


def program(*, labels: bool = True, static: int | None = None) -> handmade.Program:
    return handmade.program(handmade.Tied(), static, labels, False)


def test_counts_are_of_all_rows() -> None:
    found = step.counts(program(), handmade.Tied(), handmade.batch(), 4, ALONE)
    assert found["count_0"].item() == (handmade.batch()["labels"] != -100).sum().item()
    assert found["count_0"].dtype == torch.float64


def test_keys_say_which_rows_a_microbatch_has() -> None:
    """Rows go to replicas first, then to micro-batches."""
    mixed = mix(7, 3)
    keys = [step.rng_keys(7, 3, 2, Groups(Mesh(dp=2), rank, torch.device("cpu"), None)) for rank in range(2)]
    assert [key.tolist() for key in keys] == [[[mixed, 0, 4], [mixed, 1, 4]], [[mixed, 2, 4], [mixed, 3, 4]]]
    assert keys[0].dtype == torch.int64


def test_sizes_of_a_microbatch() -> None:
    assert {str(name): size for name, size in sizes_of(program(), handmade.batch(), 4).items()} == {"b": 2, "s": 5}


def test_outputs_of_microbatches_are_joined() -> None:
    chunks = [(torch.tensor(1.0), torch.full((2, 5, 3), 1.0)), (torch.tensor(2.0), torch.full((2, 5, 3), 2.0))]
    loss, logits = outputs.merge(program(), chunks)
    assert loss.item() == 3.0 and logits[:, 0, 0].tolist() == [1, 1, 2, 2]
    rebuilt = outputs.rebuild(program(), (loss, logits))
    assert list(rebuilt) == ["loss", "logits"] and rebuilt["loss"] is loss


def test_outputs_without_rows() -> None:
    found = program(labels=False)
    (name,) = found.returned()
    whole = replace(found, types={**found.types, name: TensorType(torch.float32, (3,))})
    assert outputs.merge(whole, [(torch.ones(3),)] * 2)[0].shape == (3,)
    second = replace(found, types={**found.types, name: TensorType(torch.float32, (3, symbol("b")))})
    assert outputs.merge(second, [(torch.ones(3, 2),)] * 2)[0].shape == (3, 4)


def test_shared_weights() -> None:
    stages = handmade.stages(program(), 2, torch.float64)
    assert shared_weights(stages) == {"embed.weight": (0, 1)}


def test_which_parameters_are_trained() -> None:
    assert reached(program()) == {"embed.weight", "mix.weight", "mix.bias"}
    graph = fx.Graph()
    a, b, c, d = (graph.placeholder(name) for name in "abcd")
    kept = graph.call_function(torch.add, (a, graph.call_function(torch.ops.aten.detach.default, (b,))))
    index = graph.call_function(torch.argmax, (c,))
    loss = graph.call_function(torch.mul, (kept, index))
    graph.output((loss, graph.call_function(torch.sin, (d,))))
    small = replace(
        program(),
        graph=graph,
        types={index.name: TensorType(torch.int64, ())},
        parameters={name: f"m.{name}" for name in "abcd"},
        loss=loss.name,
    )
    assert reached(small) == {"m.a"}
    assert reached(replace(small, loss=None)) == {"m.a", "m.d"}


def test_a_gradient_that_is_missing() -> None:
    root = StageRoot(nn.Linear(2, 2), {})
    root.program.bias.requires_grad_(False)
    with pytest.raises(TpcompileError) as error:
        check_gradients(root, frozenset({"weight", "bias"}))
    assert str(error.value) == (
        "no gradient after a step: weight\n"
        "  at   compiled.train_step\n"
        "  fix  this is a fault of tpcompile or torch: please report it with the model and the mesh"
    )


def test_a_later_capture_borrows_the_parameters() -> None:
    first, second = nn.Linear(2, 3), nn.Linear(2, 3)
    root = StageRoot(first, {})
    root.capture = root.adopt(second)
    x = torch.ones(1, 2)
    assert torch.equal(root(x), first(x)[:1])
    assert all(p.is_meta for p in second.parameters()) and len(list(root.parameters())) == 2
    root(x)[0].sum().backward()
    assert first.weight.grad is not None


def test_a_later_capture_with_other_parameters_is_refused() -> None:
    root = StageRoot(nn.Linear(2, 3), {})
    with pytest.raises(Refused) as error:
        root.adopt(nn.Linear(2, 4))
    assert str(error.value) == (
        "parameter weight has local shape [4, 2] here, and [3, 2] in the first capture of the model\n"
        "  fix  compile with example_inputs that use it, or compile a second object for these inputs"
    )
    with pytest.raises(Refused) as error:
        root.adopt(nn.Sequential(nn.Linear(2, 3)))
    assert error.value.what == "parameter 0.weight has local shape [3, 2] here, and was not used in the first capture of the model"
