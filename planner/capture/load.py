"""`load_model`: the MODEL argument of the commands becomes a module on the meta device and example inputs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoparallel.costmodel.collecting import without_collection
from autoparallel.planner.capture.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A module without weights, and example inputs: keyword arguments, or a tuple where it takes `*args`."""

    module: torch.nn.Module
    example_inputs: Any
    name: str
    warnings: tuple[str, ...] = ()  # what the module leaves out of what it was loaded from


@without_collection()
def load_model(
    spec: str, *, model_args: Mapping[str, str], seq_len: int | None = None, seq_len_asked: bool = False
) -> LoadedModel:
    """Load `hf:PATH`, `FILE.py:NAME` or `package.module:NAME`. Raises ModelError (a UserError).

    `model_args` are passed to the callable NAME, converted by its annotations; so is `seq_len` where it takes an
    argument of that name; where it does not, a length that the user asked for (`seq_len_asked`) is refused. No weights are read, and code that a configuration points to is never run.
    """
    if spec.startswith("hf:"):
        if model_args:
            raise ModelError(f"{spec}: --model-arg is for FILE.py:NAME; edit the config.json instead")
        from autoparallel.planner.capture.huggingface import load_huggingface

        module, inputs, name, warnings = load_huggingface(Path(spec.removeprefix("hf:")), seq_len)
        return LoadedModel(module=module, example_inputs=inputs, name=name, warnings=warnings)
    where, colon, name = spec.rpartition(":")
    if spec.endswith(".py") and Path(spec).is_file():
        raise ModelError(f"{spec}: name the function in it that returns the model: {spec}:NAME")
    if not colon or not where or not name:
        raise ModelError(
            f"{spec!r} is not a model: use hf:PATH, FILE.py:NAME, package.module:NAME or a saved GRAPH.json"
        )
    factory = _find(where, name, spec)
    if seq_len_asked and not _takes(factory, "seq_len"):
        raise ModelError(
            f"{spec}: {factory.__name__} takes no argument seq_len, so --seq-len would change nothing: leave it out, set "
            "what the length is called with --model-arg, or give the function an argument seq_len"
        )
    named = "seq_len" in inspect.signature(factory).parameters
    length = {"seq_len": seq_len} if seq_len is not None and (named or seq_len_asked) else {}
    made = _call(factory, _arguments(factory, model_args, length, spec), spec)
    return _loaded(made, spec, name)


def _find(where: str, name: str, spec: str) -> Callable[..., Any]:
    try:
        source = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    except ModelError:
        raise
    except SystemExit as error:
        raise ModelError(
            f"{spec}: importing {where} ended the process ({_ended(error)}): put what reads arguments or trains under "
            '`if __name__ == "__main__":`'
        ) from error
    except Exception as error:
        raise ModelError(f"{spec}: importing {where} failed: {type(error).__name__}: {error}") from error
    factory = getattr(source, name, None)
    if isinstance(factory, torch.nn.Module):
        raise ModelError(
            f"{spec} is a module already; name a function that returns it with example inputs: (module, inputs)"
        )
    if not callable(factory):
        public = [
            n for n, v in vars(source).items() if inspect.isfunction(v) and v.__module__ == source.__name__
        ]
        raise ModelError(
            f"{spec}: {where} has no function called {name}; it has {', '.join(public) or 'none'}"
        )
    return typing.cast("Callable[..., Any]", factory)


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"{path}: no such file")
    module_name = f"_autoparallel_model_{path.stem}"
    found = importlib.util.spec_from_file_location(module_name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module  # dataclasses and pickles look their module up
    sys.path.insert(0, str(path.parent.resolve()))  # the file may import its neighbours, as when it is run
    try:
        found.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def _import_module(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise ModelError(
                f"{name}: no such Python module; a file is given as path/to/{name.split('.')[-1]}.py:NAME"
            ) from error
        raise
    finally:
        sys.path.pop(0)


def _arguments(
    factory: Callable[..., Any], model_args: Mapping[str, str], given: Mapping[str, Any], spec: str
) -> dict[str, Any]:
    """What it is called with: `given`, unless the user's own arguments say otherwise."""
    parameters = inspect.signature(factory).parameters
    result: dict[str, Any] = {}
    try:
        hints = typing.get_type_hints(factory)
    except Exception:
        hints = {}  # annotations that cannot be evaluated: literals are tried
    for key, text in model_args.items():
        if not _takes(factory, key):
            raise ModelError(
                f"{spec}: {factory.__name__} takes no argument {key!r}; it takes {', '.join(parameters) or 'none'}"
            )
        result[key] = _convert(text, hints.get(key), f"{spec}: --model-arg {key}={text}")
    result = {**given, **result}
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY} and name not in result
    ]
    if missing:
        raise ModelError(f"{spec}: {factory.__name__} needs --model-arg {missing[0]}=VALUE")
    return result


def _takes(factory: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(factory).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _convert(text: str, annotation: Any, where: str) -> Any:
    """A command-line string as the annotated type; without one, a Python literal or the string itself."""
    if annotation is bool:
        if text.lower() not in _BOOLEANS:
            raise ModelError(f"{where}: not a boolean; use true or false")
        return _BOOLEANS[text.lower()]
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError as error:
            raise ModelError(f"{where}: not {'an integer' if annotation is int else 'a number'}") from error
    if annotation is str:
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _call(factory: Callable[..., Any], arguments: dict[str, Any], spec: str) -> Any:
    """The callable's result, built on the meta device; on its own device if it cannot be built there."""
    try:
        try:
            with torch.device("meta"):
                return factory(**arguments)
        except (NotImplementedError, RuntimeError):
            return factory(**arguments)
    except ModelError:
        raise
    except SystemExit as error:
        raise ModelError(f"{spec} ended the process ({_ended(error)}): return the module instead") from error
    except Exception as error:
        raise ModelError(f"{spec} raised {type(error).__name__}: {error}") from error


def _ended(error: SystemExit) -> str:
    return f"sys.exit({'' if error.code is None else repr(error.code)})"


def _loaded(made: Any, spec: str, name: str) -> LoadedModel:
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            f"{spec} returned {type(made).__name__}: return a torch.nn.Module, or (module, example_inputs)"
        )
    if inputs is None:
        raise ModelError(
            f"{spec} returned a module without example inputs: return (module, example_inputs), where the inputs "
            "are a tensor, a tuple or a dict of keyword arguments, batch first"
        )
    return LoadedModel(module=module, example_inputs=keyword_inputs(module, inputs), name=name)


def keyword_inputs(module: torch.nn.Module, inputs: Any) -> Any:
    """Example inputs as keyword arguments of `module.forward`; unchanged where it takes `*args`."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    positional = inputs if isinstance(inputs, tuple) else (inputs,)
    signature = inspect.signature(module.forward)
    if any(p.kind in {p.VAR_POSITIONAL, p.POSITIONAL_ONLY} for p in signature.parameters.values()):
        return positional
    try:
        return dict(signature.bind(*positional).arguments)
    except TypeError as error:
        raise ModelError(f"the example inputs do not fit {type(module).__name__}.forward: {error}") from error
