"""The compiled object in one process: what it gives without a process group, and its complaints word for word."""

from __future__ import annotations

from typing import Any

import handmade
import pytest
import torch
from torch import nn

from tpcompile.errors import InputError, Refused, TpcompileError
from tpcompile.runtime import compiled as compiled_module
from tpcompile.runtime.compiled import Compiled, compile


def message(error: pytest.ExceptionInfo[TpcompileError]) -> list[str]:
    """The lines of an error; its source must be this file."""
    lines = str(error.value).split("\n")
    assert error.value.source.startswith("test_compiled.py:")
    return [line for line in lines if not line.startswith("  from ")]


def one(example: Any = None, model: nn.Module | None = None, **settings: Any) -> Compiled:
    return handmade.compiled(model or handmade.Tied(), "tp=1", example, **settings)


def same_gradients(compiled: Compiled, model: nn.Module) -> None:
    for name, p in compiled.named_parameters():
        expected = model.get_parameter(name).grad
        if expected is None:
            assert p.grad is None
        else:
            assert torch.allclose(p.grad, expected, rtol=0, atol=1e-12), name


def test_a_step_on_one_device() -> None:
    compiled, model = one(microbatches=4), handmade.Tied()
    loss = compiled.train_step(**handmade.batch())
    expected = model(**handmade.batch())["loss"]
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12) and not loss.requires_grad
    assert {name for name, _ in compiled.named_parameters()} == {name for name, _ in model.named_parameters()}
    same_gradients(compiled, model)
    assert all(p.grad is None for p in compiled.model.parameters())


def test_call_on_one_device() -> None:
    compiled, model = one(handmade.batch()), handmade.Tied()
    output, expected = compiled(**handmade.batch()), model(**handmade.batch())
    assert list(output) == ["loss", "logits"] and torch.equal(output["logits"], expected["logits"])
    output["loss"].backward()
    expected["loss"].backward()
    same_gradients(compiled, model)
    assert torch.equal(compiled(handmade.batch()["input_ids"])["logits"], expected["logits"])  # positional, and no labels: captured anew


def test_a_mesh_without_processes_can_be_read() -> None:
    compiled = handmade.compiled(handmade.Tied(), "dp=2,pp=2", handmade.batch())
    assert [compiled.program(rank).coordinates["pp"] for rank in range(4)] == [0, 1, 0, 1]
    with pytest.raises(InputError) as error:
        compiled.train_step(**handmade.batch())
    assert message(error) == [
        "mesh dp=2,pp=2,tp=1 needs 4 processes, and no process group is initialised",
        "  at   compiled.train_step(input_ids=[8, 5], labels=[8, 5])",
        "  fix  start with torchrun --nproc-per-node 4 and call torch.distributed.init_process_group(), or use tpcompile.launch(fn, mesh)",
    ]
    with pytest.raises(InputError) as error:
        compiled.program(rank=4)
    assert message(error) == ["mesh dp=2,pp=2,tp=1 has no rank 4", "  at   compiled.program(rank=4)", "  fix  use a rank from 0 to 3"]


def test_rows_that_do_not_divide() -> None:
    expected = [
        "a batch of 10 rows cannot be divided into 4 equal micro-batches",
        "  at   compiled.train_step(input_ids=[10, 5], labels=[10, 5])",
        "  fix  use a batch of 8 or 12 rows, or microbatches=2 or 5",
    ]
    for example in (None, handmade.batch()):
        with pytest.raises(InputError) as error:
            one(example, microbatches=4).train_step(**handmade.batch(rows=10))
        assert message(error) == expected


def test_labels_missing() -> None:
    with pytest.raises(InputError) as error:
        one(handmade.batch()).train_step(input_ids=handmade.batch()["input_ids"])
    assert message(error) == [
        "labels is missing",
        "  at   compiled.train_step(input_ids=[8, 5])",
        "  fix  pass labels: the loss is computed from it",
    ]


def test_no_loss() -> None:
    with pytest.raises(InputError) as error:
        one().train_step(input_ids=handmade.batch()["input_ids"])
    assert message(error) == [
        "the model has no loss: its output is neither a scalar nor has a .loss",
        "  at   compiled.train_step(input_ids=[8, 5])",
        "  fix  pass loss= to tpcompile.compile, or the labels with the batch",
    ]


def test_optimizer_before_the_first_capture() -> None:
    with pytest.raises(InputError) as error:
        one().optimizer(torch.optim.SGD, lr=1.0)
    assert message(error) == [
        "no parameters yet: the model is captured at the first step, since compile was given no example inputs",
        "  at   compiled.optimizer(SGD)",
        "  fix  pass example_inputs to tpcompile.compile, or run a step first",
    ]


def test_history_before_the_first_capture() -> None:
    with pytest.raises(InputError) as error:
        _ = one().history
    assert message(error) == [
        "the model is not captured yet: compile was given no example inputs",
        "  at   compiled",
        "  fix  pass example_inputs to tpcompile.compile, or run a step first",
    ]


def test_meta_parameters_can_be_read_and_not_run() -> None:
    compiled = one(handmade.batch(), handmade.Tied().to("meta"))
    assert compiled.program().module is not None
    with pytest.raises(InputError) as error:
        compiled.train_step(**handmade.batch())
    assert message(error) == [
        "parameter embed.weight is on the meta device: it has no values",
        "  at   compiled.train_step(input_ids=[8, 5], labels=[8, 5])",
        "  fix  pass weights= to compile: a directory of safetensors, or tpcompile.Initial(seed)",
    ]


def test_a_loss_that_is_no_sum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    def lower(*args: Any) -> handmade.Lowered:
        found = handmade.lower(*args)
        found.program = replace(found.program, loss_reason="aten.std at loss.py:3: no rule")
        return found

    monkeypatch.setattr(compiled_module, "lower", lower)
    with pytest.raises(Refused) as error:
        compile(handmade.Tied(), "dp=2", handmade.batch(), microbatches=2)
    assert message(error) == [
        "the loss of a batch is not the sum of its parts' losses: aten.std at loss.py:3: no rule",
        "  at   compile(dp=2, microbatches=2)",
        "  fix  use dp=1 and microbatches=1, or a loss that is linear in sums and means over rows, or "
        'overrides={"loss.py:3": "per micro-batch"} to take micro-batches\' mean',
    ]
    compile(handmade.Tied(), "tp=1", handmade.batch())


def test_data_parallel_modes_that_are_unknown() -> None:
    with pytest.raises(InputError) as error:
        compile(handmade.Tied(), "dp=2", data_parallel="zero4")
    assert message(error) == [
        "there is no data_parallel 'zero4'",
        "  at   compile(data_parallel='zero4')",
        "  fix  use ddp, zero1, zero2 or zero3",
    ]


def test_a_name_in_place_of_a_model() -> None:
    with pytest.raises(InputError) as error:
        compile("gpt2", "dp=2")  # type: ignore[arg-type]
    assert message(error) == [
        "'gpt2' is no model",
        "  at   compile",
        "  fix  build the model first: torch.nn.Module with weights, or on the meta device",
    ]


@pytest.mark.parametrize("method", ["train_step", "eval_step"])
def test_a_batch_that_is_not_given_by_keywords(method: str) -> None:
    compiled = one(handmade.batch())
    with pytest.raises(InputError) as error:
        getattr(compiled, method)(handmade.batch())
    assert message(error) == [
        "a batch is given by keywords, not as a dict",
        f"  at   compiled.{method}",
        f"  fix  write compiled.{method}(**batch)",
    ]
    with pytest.raises(InputError) as error:
        getattr(compiled, method)(*handmade.batch().values())
    assert message(error) == [
        "a batch is given by keywords, not as a Tensor, a Tensor",
        f"  at   compiled.{method}",
        f"  fix  name every argument: compiled.{method}(input_ids=…, labels=…)",
    ]


def test_an_evaluation_leaves_gradients_and_follows_the_mode() -> None:
    compiled, model = one(handmade.batch()), handmade.Tied()
    compiled.train_step(**handmade.batch())
    before = {name: p.grad.clone() for name, p in compiled.named_parameters() if p.grad is not None}
    loss, outputs = compiled.eval_step(**handmade.batch(seed=1))
    expected = model(**handmade.batch(seed=1))
    assert loss.item() == pytest.approx(expected["loss"].item(), abs=1e-12)
    assert not loss.requires_grad and not outputs["logits"].requires_grad and torch.equal(outputs["logits"], expected["logits"])
    assert all(torch.equal(p.grad, before[name]) for name, p in compiled.named_parameters() if p.grad is not None)


class WithDummies(handmade.Tied):
    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        return handmade.batch()


def test_dummy_inputs_serve_as_example() -> None:
    assert one(None, WithDummies()).compilation.program.loss


def test_dropout_that_is_unknown() -> None:
    with pytest.raises(InputError) as error:
        compile(handmade.Tied(), "tp=2", dropout="exakt")
    assert message(error) == [
        "there is no dropout 'exakt'",
        "  at   compile(dropout='exakt')",
        '  fix  use dropout="local", "exact" or "fast"',
    ]
