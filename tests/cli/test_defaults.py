"""A command and the function that it calls do the same unless they are told otherwise."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from sparse_tl import runs
from sparse_tl.cli import commands
from sparse_tl.cli.options import split_names, split_seeds
from sparse_tl.training import post_train

COMMANDS = {
    "addition": (commands.addition, runs.run_addition),
    "post-train": (commands.post_train, runs.run_post_training),
    "circuits": (commands.circuits, runs.run_circuits),
    "head-roles": (commands.head_roles, runs.run_head_roles),
    "doctor": (commands.doctor, runs.run_doctor),
}


def defaults(function: Any) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_the_defaults_of_its_function(name: str) -> None:
    """What a command says nothing about is what the function does by itself."""
    command, function = COMMANDS[name]
    expected = defaults(function)
    found = defaults(command)
    found["progress"] = not found.pop("quiet", False)
    for option, default in found.items():
        if option == "out" or (option == "progress" and name == "doctor"):
            continue
        if expected[option] == ():
            default = tuple(split_names(default))
        elif option == "seeds" and isinstance(default, str):
            default = split_seeds(default)
        assert default == expected[option], option


def test_post_training_on_text_has_the_defaults_of_post_training() -> None:
    found, expected = defaults(runs.run_post_training), defaults(post_train)
    shared = {"steps", "learning_rate", "head_cost", "precision", "seed"}
    assert {name: found[name] for name in shared} == {name: expected[name] for name in shared}
