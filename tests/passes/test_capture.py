"""The captured graph computes what the eager model computes: outputs and every gradient, at the captured shape and at another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from zoo.measure import sample, weighted_sum

from tpcompile.demo.model import GPT, Config
from tpcompile.ir import Program
from tpcompile.layout import TensorType
from tpcompile.passes._binding import arguments, leaves
from tpcompile.passes.capture import bind_example, capture, matches
from tpcompile.text import text

VOCABULARY = 61
Batch = Mapping[str, Any]


def ids(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape)


def words(rows: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": ids(rows, length), "labels": ids(rows, length)}


def run(program: Program, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """The values of a program's outputs by node name."""
    given = dict(leaves(batch)[0])
    held = {placeholder: model.get_parameter(name) for placeholder, name in program.parameters.items()}
    held |= {placeholder: model.get_buffer(name) for placeholder, name in program.buffers.items()}
    held |= program.constants
    held |= {placeholder: given[i.path] for placeholder, i in program.inputs.items()}
    placeholders = program.graph.find_nodes(op="placeholder")
    values = fx.Interpreter(fx.GraphModule(nn.Module(), program.graph)).run(*[held[node.name] for node in placeholders])
    return dict(zip([node.name for node in program.graph.output_node().args[0]], values, strict=True))


def weighed(tensors: list[Tensor]) -> Tensor:
    """A scalar that every element of the outputs moves."""
    floats = [t.double() for t in tensors if t.is_floating_point()]
    return torch.stack([(t * torch.linspace(-1, 2, t.numel()).reshape(t.shape)).sum() for t in floats]).sum()


def assert_same(program: Program, model: nn.Module, batch: Batch, loss: Callable[..., Tensor] | None = None) -> None:
    """Outputs, their type, the loss and every gradient are those of the eager model, with the same random numbers."""
    args, kwargs = arguments(model, batch, with_loss=loss is not None)
    torch.manual_seed(1)
    outputs = model(*args, **kwargs)
    expected, spec = pytree.tree_flatten(outputs)
    eager_loss = loss(outputs, batch) if loss else None
    torch.manual_seed(1)
    values = run(program, model, batch)
    found = [program.output_constants.get(i) if name is None else values[name] for i, name in enumerate(program.outputs)]
    assert program.out_spec == spec
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6) if isinstance(a, Tensor) else [a] == [b] or pytest.fail(f"{a} != {b}")
    if eager_loss is not None:
        torch.testing.assert_close(values[str(program.loss)], eager_loss)
    eager = eager_loss if eager_loss is not None else weighed([leaf for leaf in expected if isinstance(leaf, Tensor)])
    ours = values[str(program.loss)] if eager_loss is not None else weighed([leaf for leaf in found if isinstance(leaf, Tensor)])
    gradients = [_gradients(model, total) for total in (eager, ours)]
    assert gradients[0].keys() == gradients[1].keys()
    scale = max((g.abs().max().item() for g in gradients[0].values()), default=1.0)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-5 * scale, msg=lambda text, name=name: f"{name}: {text}")


def _gradients(model: nn.Module, total: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    if total.requires_grad:
        total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(model: nn.Module, batch: Batch, *others: Batch, loss: Callable[..., Tensor] | None = None) -> Program:
    program = capture(model, batch, loss=loss)
    for each in (batch, *others):
        assert matches(program, each, model)
        assert_same(program, model, each, loss)
    return program


def shapes(program: Program) -> dict[str, str]:
    kinds = {name: program.types[name] for name in program.inputs}
    return {name: ", ".join(map(str, kind.shape)) for name, kind in kinds.items() if isinstance(kind, TensorType)}


# ---------------------------------------------------------------------------------------------- whole models


def test_the_demo() -> None:
    model = GPT(Config(layers=3))
    program = check(model, words(4, 8), words(3, 11))
    assert shapes(program) == {"input_ids": "b, s", "labels": "b, s"}
    assert {str(symbol): place for symbol, place in program.symbols.items()} == {"b": ("input_ids", 0), "s": ("input_ids", 1)}
    assert program.layers == ("blocks.0", "blocks.1", "blocks.2")
    assert program.aliases == {"head.weight": "tokens.weight"}
    assert program.parameters["p_tokens_weight"] == "tokens.weight" and "head.weight" not in program.parameters.values()
    assert [i.batch_dim for i in program.inputs.values()] == [0, 0]
    assert program.loss == program.outputs[0] == "cross_entropy_loss"
    source = program.sources["scaled_dot_product_attention_1"]
    assert (source.file, source.path) == ("model.py", "blocks.1.attention")
    assert source.code == "mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)"
    assert program.sources["linear"].path == "blocks.0.attention.qkv" and program.sources["linear"].file == "model.py"


def test_fixed_sizes() -> None:
    model, batch = GPT(Config(layers=2)), words(4, 8)
    program = capture(model, batch, dynamic=False)
    assert shapes(program) == {"input_ids": "4, 8", "labels": "4, 8"} and not program.symbols
    assert_same(program, model, batch)
    assert matches(program, batch, model) and not matches(program, words(4, 9), model)


def test_text_of_one_layer(golden: Callable[..., None]) -> None:
    golden(text(capture(GPT(Config(layers=1)), words(4, 8))), "capture")


SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": VOCABULARY}
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
T5 = {"num_layers": 2, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "vocab_size": VOCABULARY, "decoder_start_token_id": 0}
MODELS = {
    "gpt2": ("AutoModelForCausalLM", GPT2, ("transformer.h.0", "transformer.h.1")),
    "llama": ("AutoModelForCausalLM", SMALL | {"num_key_value_heads": 2}, ("model.layers.0", "model.layers.1")),
    "gpt_neox": ("AutoModelForCausalLM", SMALL, ("gpt_neox.layers.0", "gpt_neox.layers.1")),
    "bert": ("AutoModelForMaskedLM", SMALL, ("bert.encoder.layer.0", "bert.encoder.layer.1")),
    "t5": ("AutoModelForSeq2SeqLM", T5, ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1")),
}


def transformer(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    auto, settings, _ = MODELS[kind]
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(kind, **settings))
    return model.train()


@pytest.mark.parametrize("kind", MODELS)
def test_transformers(kind: str) -> None:
    program = check(transformer(kind), words(4, 8), words(3, 11))
    assert program.layers == MODELS[kind][2]
    assert shapes(program) == {"input_ids": "b, s", "labels": "b, s"}
    assert program.notes == ()


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = GPT(Config(layers=2))
    real = str(capture(GPT(Config(layers=2)), words(4, 8)).graph)
    assert real == str(capture(model, words(4, 8)).graph)


def blank(model: nn.Module) -> nn.Module:
    """The same model on the meta device, buffers and all; what is tied stays tied."""
    empty, made = copy.deepcopy(model), dict[int, Any]()
    for module in empty.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in made:
                    new = tensor.detach().to("meta")
                    made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new, tensor
                table[name] = tensor if tensor is None else made[id(tensor)][0]
    return empty


@pytest.mark.parametrize("kind", ["causal/mixtral", "causal/mamba", "s2s/t5"])
def test_code_that_asks_for_its_device(kind: str) -> None:
    """Experts sort by another type on a GPU, a scan is chosen, heads are tied: without values all of it is captured as with them."""
    model, batch = sample(kind)
    real = text(capture(model, batch, loss=weighted_sum))
    assert text(capture(blank(model), batch, loss=weighted_sum)) == real


def test_equal_text_twice() -> None:
    model = transformer("gpt2")
    assert str(capture(model, words(4, 8)).graph) == str(capture(model, words(4, 8)).graph)


def features(rows: int, length: int) -> dict[str, Tensor]:
    return {"src": torch.randn(rows, length, 16)}


def encoder(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout, batch_first=True), 2, enable_nested_tensor=False)


def test_torch_encoder() -> None:
    program = check(encoder(), features(4, 8), features(3, 11))
    assert (program.layers, program.loss, shapes(program)) == (("layers.0", "layers.1"), None, {"src": "b, s, 16"})


def test_torch_encoder_with_masks() -> None:
    def masked(rows: int, length: int) -> dict[str, Tensor]:
        padding = torch.zeros(rows, length, dtype=torch.bool)
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        return features(rows, length) | {"mask": causal, "src_key_padding_mask": padding, "is_causal": True}

    program = check(encoder(0.0), masked(4, 8), masked(3, 11))
    assert shapes(program) == {"src": "b, s, 16", "mask": "s, s", "src_key_padding_mask": "b, s"}
    assert [i.batch_dim for i in program.inputs.values()] == [0, None, 0]


def test_torch_encoder_with_as_many_rows_as_positions() -> None:
    def masked(rows: int, length: int) -> dict[str, Any]:
        return features(rows, length) | {"mask": torch.zeros(length, length), "is_causal": False}

    program = check(encoder(0.0), masked(8, 8), masked(3, 11))
    assert [i.batch_dim for i in program.inputs.values()] == [0, None]


def test_torch_encoder_and_decoder() -> None:
    def pair(rows: int, source: int, target: int) -> dict[str, Tensor]:
        return {"src": torch.randn(rows, source, 16), "tgt": torch.randn(rows, target, 16)}

    torch.manual_seed(0)
    program = check(nn.Transformer(16, 4, 2, 2, 32, batch_first=True), pair(4, 8, 6), pair(3, 5, 5))
    assert shapes(program) == {"src": "b, s, 16", "tgt": "b, s1, 16"}
    assert program.layers == ("encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1")


def test_nothing_changes_outside() -> None:
    model, batch = encoder(), features(4, 8)
    state, training = {name: value.clone() for name, value in model.state_dict().items()}, [m.training for m in model.modules()]
    before = torch.get_rng_state()
    with torch.inference_mode():
        program = capture(model, batch)
    assert torch.equal(torch.get_rng_state(), before) and [m.training for m in model.modules()] == training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert_same(program, model, batch)


# --------------------------------------------------------------------------------------------- small models


class Small(nn.Module):
    """Two linears, a buffer and a plain tensor, with a function as its forward."""

    def __init__(self, compute: Callable[[Small, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.compute = nn.Linear(6, 6), nn.Linear(6, 6), compute
        self.register_buffer("scale", torch.arange(1.0, 7.0))
        self.plain = torch.arange(6.0)

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def rows(count: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.randn(count, length, 6)}


def write_to_slices(m: Small, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, 1:3].add_(1)
    y.mul_(2)
    y.view(-1, 6)[:, 0] = 0
    y[:, :, 1:3] = x[:, :, 0:2]
    return m.b(y) + y


def write_to_views(m: Small, x: Tensor) -> Tensor:
    y = m.a(x)
    seen = y.transpose(1, 2)
    y.masked_fill_(x > 0.5, 0.0)
    seen[:, 0].fill_(3)
    y.unsqueeze(0).permute(1, 0, 2, 3)[:, 0].clamp_(min=-1)
    left, right = y.detach().clone().requires_grad_(False).add(m.b(x)).unsafe_chunk(2, dim=-1)
    left.mul_(2)
    return seen.sum(1) + right.sum(-1) + left.sum(-1)


def write_to_new_memory(m: Small, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, :2] = m.a(x)[:, :2]
    y.index_put_((torch.tensor([0, 1]), torch.tensor([1, 1])), torch.ones(6))
    counts = (x > 0).long()
    counts.add_(1)
    counts *= 2
    return y.scatter_add_(2, counts.clamp(max=5), m.b(x)) * counts


def write_shapes_and_types(m: Small, x: Tensor) -> Tensor:
    y = m.a(x)
    y.unsqueeze_(0)
    y.add_(1)
    y.squeeze_(0)
    F.relu(y, inplace=True)
    wide = torch.zeros(6, dtype=torch.float64)
    wide.copy_(y[0, 0])
    half = y.half()
    half += y * 2
    return y + wide.float() + half.float()


def write_to_inputs(m: Small, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = 0
    return m.a(x)


def without_gradient(m: Small, x: Tensor) -> Tensor:
    y = m.a(x)
    with torch.no_grad():
        z = torch.sin(y)
        twice = z * 2
        with torch.enable_grad():
            w = m.b(y) * z
    return y * z + twice + w * y.detach()


def cast_without_gradient(m: Small, x: Tensor) -> Tensor:
    """A cast to the same type returns its operand: under no_grad it must not stop the gradient of the operand's later uses."""
    y = m.a(x)
    with torch.no_grad():
        z = y.to(y.dtype).sum()
    return y * 2 + z


def autocast_off(m: Small, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return m.a(x)


def constants(m: Small, x: Tensor) -> Tensor:
    return m.a(x) * m.plain + torch.tensor([1.0, 2, 3, 4, 5, 6]) * m.scale


FUNCTIONS = [
    write_to_slices,
    write_to_views,
    write_to_new_memory,
    write_shapes_and_types,
    write_to_inputs,
    without_gradient,
    cast_without_gradient,
    autocast_off,
    constants,
]


@pytest.mark.parametrize("compute", FUNCTIONS, ids=lambda f: f.__name__)
def test_forward(compute: Callable[[Small, Tensor], Any]) -> None:
    program = check(Small(compute), rows(4, 5), rows(3, 7))
    names = [str(node.target) for node in program.graph.nodes]
    assert not [name for name in names if name.startswith("aten") and name.split(".")[1].endswith("_")]
    assert not [name for name in names if "wrap_with" in name or "_assert" in name]


def test_a_detach_where_gradients_would_pass() -> None:
    text = str(capture(Small(without_gradient), rows(4, 5)).graph)
    assert text.count("aten.detach.default") == 3


def test_constants_are_placeholders() -> None:
    program = capture(Small(constants), rows(4, 5))
    assert {name: value.tolist() for name, value in program.constants.items()} == {
        "c_lifted_tensor_0": [1, 2, 3, 4, 5, 6],
        "c_plain": [0, 1, 2, 3, 4, 5],
    }
    assert program.buffers == {"b_scale": "scale"} and program.parameters == {"p_a_weight": "a.weight", "p_a_bias": "a.bias"}


def test_checkpointing_is_noted() -> None:
    from torch.utils.checkpoint import checkpoint

    for reentrant in (True, False):
        model = Small(lambda m, x, r=reentrant: checkpoint(lambda y: torch.tanh(m.a(y)), m.b(x), use_reentrant=r))
        program = check(model, rows(4, 5))
        assert program.notes == ("the model's own activation checkpointing is left out",)


def test_batch_norm_in_eval_mode() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).eval()
    check(model, {"input": torch.randn(4, 6)}, {"input": torch.randn(3, 6)})


# --------------------------------------------------------------------------------------- inputs and outputs


@dataclass
class Answer:
    y: Tensor
    parts: tuple[Tensor, ...]
    word: str
    nothing: None = None


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 6)

    def forward(self, given: dict[str, Any], flag: bool = True, *, scale: float = 1.0) -> Answer:
        y = self.a(given["many"][0]) * scale + given["one"] if flag else given["one"]
        return Answer(y, (y, given["many"][1], y.sum(-1)), "a word")


def nested(count: int, length: int) -> dict[str, Any]:
    many = [torch.randn(count, length, 6), torch.randn(1, length, 6)]
    return {"given": {"many": many, "one": torch.randn(length, 6)}, "scale": 2.0, "target": torch.randn(count, length, 6)}


def squared(outputs: Answer, batch: Batch) -> Tensor:
    return F.mse_loss(outputs.y, batch["target"])


def test_nested_inputs_a_dataclass_and_a_loss() -> None:
    program = check(Nested(), nested(4, 5), nested(3, 7), loss=squared)
    assert {name: (i.path, i.batch_dim) for name, i in program.inputs.items()} == {
        "given_many_0": ("given.many.0", 0),
        "given_many_1": ("given.many.1", None),
        "given_one": ("given.one", None),
        "target": ("target", 0),
    }
    assert program.loss == "mse_loss" and program.loss not in program.outputs
    assert program.output_constants == {4: "a word"} and program.outputs[4:] == (None,)
    assert program.outputs[0] == program.outputs[1]
    assert not matches(program, nested(4, 5) | {"scale": 3.0}, Nested())


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(self.table(a).flatten(0, 1), b.flatten())


def test_one_tensor_for_two_inputs() -> None:
    same = ids(4, 5)
    program = check(Scored(), {"a": same, "b": same}, {"a": ids(3, 7), "b": ids(3, 7)})
    assert list(program.inputs) == ["a", "b"] and program.outputs == (program.loss,)


def test_positional_examples() -> None:
    a, b = ids(4, 5), ids(4, 5)
    assert list(bind_example(Scored(), (a, b))) == ["a", "b"]
    assert list(bind_example(Scored(), {"b": b, "a": a})) == ["b", "a"]


def test_a_cache_in_the_output_is_left_out() -> None:
    class Cache:
        pass

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
            return {"y": super().forward(x), "cache": Cache()}

    program = capture(Model(6, 6), rows(4, 5))
    assert program.notes == ("output['cache'] is left out: torch.export cannot return a Cache",)
    assert program.outputs == ("linear", None) and program.output_constants == {1: None}


def test_a_size_in_the_output() -> None:
    model = Small(lambda m, x: {"y": m.a(x), "elements": x.shape[0] * x.shape[1]})
    check(model, rows(4, 5), rows(3, 7))


# ------------------------------------------------------------------------------------------ layers and sizes


def test_layers_of_a_sequence() -> None:
    block = [nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(3)]
    program = capture(nn.Sequential(nn.Linear(6, 6), *block, nn.Linear(6, 2)), {"input": torch.randn(4, 6)})
    assert program.layers == ("1", "2", "3")


def test_no_layers_where_one_runs_again() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList(nn.Sequential(nn.Linear(6, 6)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for step in (*self.steps, *self.steps):
                x = step(x)
            return x

    assert capture(Twice(), rows(4, 5)).layers == ()


def test_one_node_for_each_size() -> None:
    def uneven(m: Small, x: Tensor) -> Tensor:
        count, length, _ = x.shape
        return m.a(x).reshape(count * length, 6).view(count, length, 6)[:, : length // 2]

    program = check(Small(uneven), rows(4, 5), rows(3, 7))
    sizes = [node for node in program.graph.nodes if not isinstance(program.types.get(node.name, ()), TensorType | tuple)]
    assert len({program.types[node.name] for node in sizes}) == len(sizes) == 4
    shape = program.types[str(program.outputs[0])].shape  # type: ignore[union-attr]
    b, s = sympy.symbols("b s", integer=True, positive=True)
    assert (shape[0], shape[1].subs(s, 7), shape[2]) == (b, 3, 6)  # type: ignore[union-attr]


def test_a_size_that_export_fixes_is_a_part_of_the_key() -> None:
    model = Small(lambda m, x: m.a(x) * int(x.shape[1]))
    program = check(model, rows(4, 5), rows(3, 5))
    assert shapes(program) == {"x": "b, 5, 6"}
    assert not matches(program, rows(4, 7), model)


def test_conditions_of_export_are_a_part_of_the_key() -> None:
    model = Small(lambda m, x: m.a(x).view(x.shape[0], 2, -1, 6))
    program = check(model, rows(4, 8), rows(3, 6))
    assert not matches(program, rows(4, 7), model)


def test_a_batch_of_one_row_is_static() -> None:
    program = check(Scored(), {"a": ids(1, 5), "b": ids(1, 5)}, {"a": ids(1, 7), "b": ids(1, 7)})
    assert shapes(program) == {"a": "1, s", "b": "1, s"}
    assert [i.batch_dim for i in program.inputs.values()] == [0, 0]
    assert not matches(program, {"a": ids(2, 5), "b": ids(2, 5)}, Scored())


def test_what_does_not_match() -> None:
    model = Scored()
    program = capture(model, {"a": ids(4, 5), "b": ids(4, 5)})
    assert matches(program, {"a": ids(2, 9), "b": ids(2, 9)}, model)
    assert not matches(program, {"a": ids(2, 9), "b": ids(2, 8)}, model)  # sizes that were equal
    assert not matches(program, {"a": ids(2, 9)}, model)
    assert not matches(program, {"a": ids(2, 9), "b": ids(2, 9), "c": 1}, model)
    assert not matches(program, {"a": ids(2, 9), "b": ids(2, 9).int()}, model)
    assert not matches(program, {"a": ids(1, 9), "b": ids(1, 9)}, model)  # export makes one row a case of its own
    assert not matches(program, {"a": ids(4, 5, 1), "b": ids(4, 5)}, model)
    model.eval()
    assert not matches(program, {"a": ids(4, 5), "b": ids(4, 5)}, model)
    model.train().table.weight.requires_grad_(False)
    assert not matches(program, {"a": ids(4, 5), "b": ids(4, 5)}, model)
