"""What several commands read from their arguments."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from ..endpoint import EndpointSettings

ENGINES = ("transformers", "vllm")  # in this process
ENDPOINT = "endpoint"


def whole(text: str, least: int) -> int:
    """Read a whole number; argparse reports what is none."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
    return value


def number(text: str, least: float, most: float = sys.float_info.max) -> float:
    """Read a number between bounds; argparse reports what is none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        bounds = f"of at least {least:g}" if most == sys.float_info.max else f"between {least:g} and {most:g}"
        raise argparse.ArgumentTypeError(f"{text} is not a number {bounds}")
    return value


count = partial(whole, least=1)
count_or_zero = partial(whole, least=0)
not_negative = partial(number, least=0)
positive = partial(number, least=1e-12)
share = partial(number, least=0, most=1)


def spellings(name: str) -> tuple[str, str]:
    """Return an option's spelling with underscores, as in training, and with dashes."""
    return name, "--" + name[2:].replace("_", "-")


class CommandParser(argparse.ArgumentParser):
    """A parser that refuses unknown options, and names them in each error: one that is mistyped makes another missing."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; what is left over is only allowed to a command that passes it on to training."""
        self._given: list[str] = list(sys.argv[1:] if args is None else args)
        options, others = super().parse_known_args(args, namespace)
        takes_others = getattr(options, "takes_training_options", False)  # or the option that they may follow
        if others and not (getattr(options, takes_others) if isinstance(takes_others, str) else takes_others):
            self.error(f"unrecognized arguments: {' '.join(map(self._with_guess, others))}")
        return options, others

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, with the unknown options, and exit with 2."""
        takes_others = self.get_default("takes_training_options")
        passes_on = f"--{takes_others}" in self._given if isinstance(takes_others, str) else takes_others
        names = [word.partition("=")[0] for word in self._given if word.startswith("--")]
        unknown = [] if passes_on else [name for name in names if name not in self._option_string_actions]
        if unknown and "unrecognized arguments" not in message:
            message += f"; unrecognized arguments: {' '.join(map(self._with_guess, unknown))}"
        super().error(message)

    def _with_guess(self, word: str) -> str:
        return with_guess(word, list(self._option_string_actions)) if word.startswith("--") else word


def with_guess(word: str, known: Sequence[str]) -> str:
    """Return an unknown name with the known one that may have been meant."""
    spelt = {name.removeprefix("--").replace("-", "_"): name for name in known}
    near = get_close_matches(word.removeprefix("--").partition("=")[0].replace("-", "_"), spelt, n=1)
    return f"{word} (did you mean {spelt[near[0]]}?)" if near else word


def refuse_unknown(of_file: Sequence[str], of_line: Sequence[str], known: Sequence[str]) -> None:
    """Refuse what no option takes, with the name that may have been meant.

    Args:
        of_file: Names in the configuration file.
        of_line: Words of the command line.
        known: Names of all options.

    Raises:
        ValueError: If there is anything.
    """
    of_line = [with_guess(word, known) if word.startswith("--") else word for word in of_line]
    places = [
        ("in the configuration file", [with_guess(name, known) for name in of_file]),
        ("on the command line", of_line),
    ]
    found = [f"{where}: {' '.join(words)}" for where, words in places if words]
    if found:
        raise ValueError(f"No option takes this, {'; '.join(found)}. `trl-ulorl train --help_all` lists all options.")


def check_output(path: Path | None) -> None:
    """Check that a file can be written where `--output` says, if it says anything.

    Raises:
        ValueError: If its folder does not exist.
    """
    if path is not None and not path.resolve().parent.is_dir():
        raise ValueError(f"`--output` ({path}) lies in a folder that does not exist. Make the folder first.")


def check_model_folder(name: str) -> None:
    """Check that what can only be a folder of a model is one, before anything slow is loaded.

    Args:
        name: A folder, or a name on the Hub, which is not checked.

    Raises:
        ValueError: If it is a path that does not exist, or a folder without a model's configuration or weights.
    """
    folder = Path(name)
    if not folder.exists():
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise ValueError(
                f"There is no folder {name!r}. Pass the folder of a saved model, or a name on the Hub, which is `owner/model`."
            )
        return
    if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        raise ValueError(
            f"{name!r} holds no model: it has no `config.json`. Pass the folder of a saved model, or a name on the Hub."
        )
    if not any(path for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern)):
        raise ValueError(
            f"{name!r} holds no weights: it has no `model.safetensors`, nor parts of one. Save the model to it to the end, or "
            "pass another folder or a name on the Hub."
        )


def check_config_file(arguments: Sequence[str]) -> None:
    """Check that the file that `--config` names is YAML with a name and a value for each option.

    Args:
        arguments: Those of a training.

    Raises:
        ValueError: If it isn't.
    """
    given = [each.partition("=") for each in arguments]
    paths = [
        value if equals else next(iter(arguments[place + 1 : place + 2]), "")
        for place, (name, equals, value) in enumerate(given)
        if name == "--config"
    ]
    import yaml

    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"There is no file {path!r}: check `--config`.")
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path!r} is no YAML ({' '.join(str(error).split())}). Correct the file.") from error
        if not isinstance(values, dict):
            raise ValueError(  # noqa: TRY004 - of a file, which is bad input
                f"{path!r} holds a {type(values).__name__}, where a name and a value are needed for each option, such as "
                "`num_segments: 4`. Correct the file."
            )


def add_engine(
    group: argparse._ActionsContainer, *, help: str, default: str | None = None, has_endpoint: bool = False
) -> None:
    """Add `--engine` to a command, and the options of an endpoint where it can ask one."""
    engines = (*ENGINES, ENDPOINT) if has_endpoint else ENGINES
    group.add_argument("--engine", choices=engines, default=default, help=help)
    if not has_endpoint:
        return
    group.add_argument(
        *spellings("--base_url"), metavar="URL", help="of the endpoint, which speaks OpenAI's API, up to and with /v1"
    )
    group.add_argument(
        *spellings("--api_key_env"),
        metavar="NAME",
        help="environment variable with the endpoint's key (default: none)",
    )
    group.add_argument(
        *spellings("--timeout_seconds"),
        type=positive,
        default=3600.0,
        metavar="S",
        help="longest wait for an answer of the endpoint (default: 3600)",
    )
    group.add_argument(
        *spellings("--max_retries"),
        type=count_or_zero,
        default=4,
        metavar="N",
        help="further tries of a request to the endpoint (default: 4)",
    )
    group.add_argument(
        *spellings("--extra_body"), metavar="JSON", help="further fields of each request to the endpoint"
    )


def read_endpoint(options: argparse.Namespace) -> EndpointSettings | None:
    """Return where the endpoint is that `--engine endpoint` asks, or None for another engine.

    Raises:
        ValueError: If its options make no sense, or are given for another engine.
    """
    if options.engine != ENDPOINT:
        if options.base_url is not None:
            raise ValueError(
                f"`--base_url` ({options.base_url}) is where an endpoint is, but `--engine` is {options.engine!r}, which runs in "
                "this process. Pass `--engine endpoint`, or leave the address out."
            )
        return None
    if options.base_url is None:
        raise ValueError(
            "`--engine endpoint` needs `--base_url`, the address of a server that speaks OpenAI's API, such as "
            "http://localhost:8000/v1 of `vllm serve`. Pass it."
        )
    from ..endpoint import EndpointSettings

    return EndpointSettings(
        base_url=options.base_url,
        api_key_env=options.api_key_env,
        timeout_seconds=options.timeout_seconds,
        max_retries=options.max_retries,
        concurrency=options.batch_size,
        extra_body=_read_object("--extra_body", options.extra_body),
    )


def _read_object(option: str, text: str | None) -> dict[str, Any]:
    try:
        value = {} if text is None else json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"`{option}` ({text}) is no JSON ({error}). Pass an object such as '{{\"top_k\": -1}}'."
        ) from error
    if not isinstance(value, dict):
        raise ValueError(  # noqa: TRY004 - the type is the text's
            f"`{option}` ({text}) must be a JSON object. Pass one such as '{{\"top_k\": -1}}'."
        )
    return value


def with_use_vllm(arguments: list[str]) -> list[str]:
    """Add the `--use_vllm` that `--engine` stands for: training's configuration is checked as it is made."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_engine(parser, help="")
    engine = parser.parse_known_args(arguments)[0].engine
    if engine is None or any(each.partition("=")[0] == "--use_vllm" for each in arguments):
        return arguments  # said already; a contradiction is refused where all are parsed
    return [*arguments, "--use_vllm", str(engine == "vllm")]


def load_reward(name: str) -> Any:
    """Return the verifier, or the function that `module:function` names, from the working folder too.

    Raises:
        ValueError: If there is none of this name.
    """
    if name == "verifier":
        from ..rewards import VerifierReward

        return VerifierReward()
    module, separator, function = name.partition(":")
    if not separator:
        raise ValueError(f"`reward` ({name!r}) must be 'verifier' or 'module:function', for instance 'my_rewards:f'.")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"`reward` ({name!r}): there is no module {error.name!r} in {os.getcwd()} or among the installed ones."
        ) from error
    if found is None:
        raise ValueError(f"`reward` ({name!r}): the module {module!r} has no function {function!r}.")
    return found
