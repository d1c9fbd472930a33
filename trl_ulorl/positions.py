"""More positions than a model was made for, by YaRN, stated once for trainer, engines and the saved configuration."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, cast

logger = logging.getLogger(__name__)

_REQUIRED = ("rope_type", "factor", "original_max_position_embeddings")
_OPTIONAL = ("rope_theta", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_EXAMPLE = '\'{"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 95232}\''


def extended_positions(config: Any, rope_parameters: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return what a model's configuration is overridden with, so that it reaches `factor` times its original positions.

    They take the place of the model's own, whatever these are. The base of the frequencies stays the model's where none
    is given: transformers would leave it out.

    Args:
        config: The model's configuration.
        rope_parameters: In transformers' spelling, a mapping or JSON: `rope_type` "yarn", `factor` and
            `original_max_position_embeddings`, and what else YaRN takes.

    Returns:
        `rope_parameters`, complete, and `max_position_embeddings`.

    Raises:
        ValueError: If they are not YaRN's, or out of range.

    Example:
        >>> from transformers import Qwen3Config
        >>> yarn = {"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 95232}
        >>> extended_positions(Qwen3Config(rope_parameters={"rope_theta": 1e6}), yarn)["max_position_embeddings"]
        142848
    """
    given = _parsed(rope_parameters)
    text_config = config.get_text_config()
    own = dict(getattr(text_config, "rope_parameters", None) or {})
    if "rope_theta" not in own:
        raise ValueError(
            f"`rope_parameters` can't be set on a model of the type {text_config.model_type!r}: it has no rotary positions, or "
            "other ones for each kind of layer. Leave them out."
        )
    complete = {"rope_theta": own["rope_theta"], **given}
    if own.get("rope_type", "default") != "default" and own != complete:
        logger.warning(
            "The model has rope parameters of its own, %s, which `rope_parameters` replaces by %s. A model gives wrong "
            "answers at other frequencies than it was trained with; leave `rope_parameters` out to keep its own.",
            own,
            complete,
        )
    positions = round(given["factor"] * given["original_max_position_embeddings"])
    return {"rope_parameters": complete, "max_position_embeddings": positions}


def _parsed(rope_parameters: Mapping[str, Any] | str) -> dict[str, Any]:
    value: Any = rope_parameters
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"`rope_parameters` ({value}) is not valid JSON ({error}). Write {_EXAMPLE}.") from error
    if not isinstance(value, Mapping) or value.get("rope_type") != "yarn":
        raise ValueError(
            f"`rope_parameters` ({value!r}) must be a mapping whose `rope_type` is 'yarn', such as {_EXAMPLE}. In training, "
            "`model_init_kwargs` takes other types."
        )
    missing = [name for name in _REQUIRED if name not in value]
    unknown = sorted(set(value) - {*_REQUIRED, *_OPTIONAL})
    if missing or unknown:
        found = f"lacks {missing}" if missing else f"has unknown keys {unknown}"
        raise ValueError(
            f"`rope_parameters` {found}: YaRN needs {', '.join(_REQUIRED)}, and takes {', '.join(_OPTIONAL)}. Write it as "
            f"{_EXAMPLE}."
        )
    factor, original = value["factor"], value["original_max_position_embeddings"]
    if (
        not _is_number(factor)
        or not factor > 1
        or not _is_number(original)
        or original != int(original)
        or original < 1
    ):
        raise ValueError(
            f"`rope_parameters` has factor {factor!r} and original_max_position_embeddings {original!r}: the first must be a "
            "number above 1, the second a whole number of positions. Their product is the number of positions."
        )
    return {**value, "factor": float(factor), "original_max_position_embeddings": int(original)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_complete(model_init_kwargs: Mapping[str, Any]) -> None:
    """Refuse rope parameters for a model that lack their base: loading takes them as they are.

    Raises:
        ValueError: If `rope_theta` is missing.
    """
    rope = model_init_kwargs.get("rope_parameters")
    if rope is not None and "rope_theta" not in cast(Mapping[str, Any], rope):
        raise ValueError(
            f"`model_init_kwargs` has `rope_parameters` ({rope}) without `rope_theta`, and they replace the model's own as a "
            "whole. Add the model's `rope_theta` (1000000.0 for Qwen3), or pass YaRN's in `--rope_parameters`, which keeps it."
        )
