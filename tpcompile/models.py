"""Models and example batches from what a user types: `package.module:factory`, or `hf:llama,num_hidden_layers=2,hidden_size=64`."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile.errors import InputError

Batch = dict[str, Any]

TASKS = {
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
}
"""What a transformers model is trained on, by the key task=…; without the key, the first one that knows the type."""

HELP = """\
MODEL is one of
  package.module:factory    factory() returns a model, or a model and its batch (a dict of tensors);
                            with a model alone, the batch is example_batch() of the same module, if there is one
  hf:TYPE[,key=value…]      a transformers model with random weights; keys are those of its config, and
                            task=causal | masked | seq2seq, dtype=float64
Where the model comes without a batch, one is made: input_ids and labels of --batch rows × --sequence
words, below config.vocab_size; without a vocabulary, the model's own dummy_inputs.
"""


@dataclass(frozen=True)
class Sizes:
    """Of a batch that is made here."""

    rows: int = 8
    sequence: int = 16


def load(spec: str, sizes: Sizes, seed: int = 0) -> tuple[nn.Module, Batch]:
    """A model and a batch for it; the same numbers in every process. Raises InputError for what cannot be found."""
    torch.manual_seed(seed)
    model, batch = _transformers_model(spec) if spec.startswith("hf:") else _own_model(spec)
    return model, example_batch(spec, model, sizes) if batch is None else batch


def _own_model(spec: str) -> tuple[nn.Module, Batch | None]:
    module_name, colon, name = spec.partition(":")
    if not (module_name and colon and name):
        raise _problem(spec, f"{spec!r} names no model", "write package.module:factory, or hf:llama,num_hidden_layers=2")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _problem(spec, f"no module named {error.name!r}", "run in the folder that holds it, or install it") from error
    finally:
        sys.path.remove(os.getcwd())
    factory = getattr(module, name, None)
    if not callable(factory):
        near = _near(name, [key for key, value in vars(module).items() if callable(value)])
        raise _problem(spec, f"module {module_name} has no function {name!r}", near or "name a function that returns a model")
    made = factory()
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise _problem(spec, f"{name}() returned {type(model).__name__}", "return an nn.Module, or (model, batch)")
    if batch is None and hasattr(module, "example_batch"):
        batch = module.example_batch()
    return model, batch


def _transformers_model(spec: str) -> tuple[nn.Module, None]:
    kind, *pairs = spec.removeprefix("hf:").split(",")
    try:
        from transformers import AutoConfig
        from transformers.models.auto import configuration_auto, modeling_auto
    except ModuleNotFoundError as error:
        raise _problem(spec, "transformers is not installed", "pip install transformers") from error
    kinds = list(configuration_auto.CONFIG_MAPPING_NAMES)
    if kind not in kinds:
        raise _problem(spec, f"transformers has no model type {kind!r}", _near(kind, kinds) or "see transformers' list of models")
    keys = _keys(spec, pairs)
    task, dtype = keys.pop("task", None), keys.pop("dtype", None)
    config = AutoConfig.for_model(kind)
    for key in keys:
        if not hasattr(config, key):
            raise _problem(spec, f"the config of {kind} has no {key!r}", _near(key, list(config.to_dict())) or "leave it out")
    tasks = [name for name, (table, _) in TASKS.items() if kind in getattr(modeling_auto, table)]
    if not tasks or task not in (None, *tasks):
        known = " or ".join(f"task={name}" for name in tasks) or "package.module:factory for this model"
        raise _problem(spec, f"{kind} has no {task or 'language'} model", f"use {known}")
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()  # its words on special tokens of other vocabularies do not matter here
    auto = getattr(transformers, TASKS[task or tasks[0]][1])
    model: nn.Module = auto.from_config(AutoConfig.for_model(kind, **keys))
    return model.to(getattr(torch, dtype)) if dtype else model, None


def _problem(spec: str, what: str, fix: str) -> InputError:
    return InputError(what, at=f"MODEL {spec}", fix=fix)


def _keys(spec: str, pairs: list[str]) -> dict[str, Any]:
    keys = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise _problem(spec, f"{pair!r} is not key=value", "write hf:llama,num_hidden_layers=2")
        try:
            keys[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            keys[key] = value
    return keys


def _near(word: str, words: list[str]) -> str:
    near = difflib.get_close_matches(word, words, n=1)
    return f"perhaps {near[0]}" if near else ""


def vocabulary(model: nn.Module) -> int | None:
    """The number of words, where the model's config says it."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    size = getattr(config, "vocab_size", None)
    return size if isinstance(size, int) else None


def example_batch(spec: str, model: nn.Module, sizes: Sizes) -> Batch:
    """Random words and labels for a language model, else the model's own dummy inputs."""
    names = inspect.signature(model.forward).parameters
    words = vocabulary(model)
    if words and "input_ids" in names:
        generator = torch.Generator().manual_seed(0)
        shape = (sizes.rows, sizes.sequence)
        wanted = [name for name in ("input_ids", "labels") if name in names]
        return {name: torch.randint(words, shape, generator=generator) for name in wanted}
    dummy = getattr(model, "dummy_inputs", None)
    if isinstance(dummy, Mapping) and any(isinstance(value, Tensor) for value in dummy.values()):
        return dict(dummy)
    raise _problem(spec, f"no batch is known for {type(model).__name__}", "return it with the model: (model, batch)")
