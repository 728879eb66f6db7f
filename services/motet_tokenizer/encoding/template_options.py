"""Decide which variables a chat template is rendered with, from what a client may set.

Templates read switches such as `enable_thinking` and levels such as `reasoning_effort`. A client
sets them by name (`chat_template_kwargs`), or through OpenAI's `reasoning_effort`, which is mapped
to what the template has. What a template does not read is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import meta

# As `encoding.control_tokens`: what transformers renders templates with.
from transformers.utils.chat_template_utils import _compile_jinja_template

from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.messages import TEMPLATE_OPTIONS_SIZE as MOST
from motet_shared.text.characters import characters

PARAM = "chat_template_kwargs"
EFFORT = "reasoning_effort"
_SWITCHES = ("enable_thinking", "thinking")  # variables that switch reasoning on or off
# Variables that the request itself, or transformers, sets.
_OWN = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "date_string",
        "strftime_now",
        "raise_exception",
    }
)


class TemplateOptions:
    """Hold the variables of one template.

    model: its name in error messages. reserved: variables that clients must not set. levels: values
    of `reasoning_effort` that the model knows; empty: any. reasons: replies may hold reasoning.
    """

    def __init__(
        self,
        source: str,
        model: str,
        *,
        reserved: frozenset[str] = frozenset(),
        levels: tuple[str, ...] = (),
        reasons: bool = False,
    ):
        self._model = model
        self._levels = levels
        self._reasons = reasons
        self.names = _variables(source) - reserved - _OWN
        self._switches = [name for name in _SWITCHES if name in self.names]

    @property
    def can_switch_off(self) -> bool:
        """Return True if replies may hold reasoning, and the template can switch it off."""
        level = EFFORT in self.names and (not self._levels or "none" in self._levels)
        return self._reasons and (bool(self._switches) or level)

    def resolve(self, effort: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables for a request.

        Raises UnsupportedParameter for a variable that the template does not read, or an effort
        that it cannot express; BadRequest for options that are too long.
        """
        if not effort and not options:
            return {}
        if characters(dict(options), MOST) > MOST:
            message = f"{PARAM}: has more than {MOST} characters; give fewer"
            raise BadRequest(message, param=PARAM)
        for name in options:
            if name not in self.names:
                known = ", ".join(sorted(self.names)) or "none"
                raise UnsupportedParameter(
                    f"{PARAM}.{name}: the chat template of model {self._model!r} does not read it; "
                    f"it reads {known}",
                    param=f"{PARAM}.{name}",
                )
        return {**(self._of_effort(effort) if effort else {}), **options}

    def _of_effort(self, effort: str) -> dict[str, Any]:
        """Return the variables that express an effort: a level, a switch, or nothing."""
        has_level = EFFORT in self.names
        if has_level and self._levels and effort not in self._levels:
            raise self._refusal(effort, f"give {', '.join(self._levels)}")
        if effort == "none" and self._reasons and not self._switches and not has_level:
            raise self._refusal(effort, "its reasoning cannot be switched off; leave it out")
        if effort != "none" and not self._reasons and not self._switches and not has_level:
            raise self._refusal(effort, "it does not reason; leave it out")
        found: dict[str, Any] = {name: effort != "none" for name in self._switches}
        return {**found, EFFORT: effort} if has_level else found

    def _refusal(self, effort: str, remedy: str) -> UnsupportedParameter:
        return UnsupportedParameter(
            f"{EFFORT}: model {self._model!r} does not support {effort!r}; {remedy}", param=EFFORT
        )


def _variables(source: str) -> frozenset[str]:
    """Return the variables that a template reads and does not set itself."""
    if not source:
        return frozenset()
    environment = _compile_jinja_template(source).environment
    found: set[str] = meta.find_undeclared_variables(environment.parse(source))
    return frozenset(found.difference(environment.globals))
