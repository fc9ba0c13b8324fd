"""Which formats of tool calls and reasoning a server reads: what its settings and template say."""

import logging
from collections.abc import Iterable

from paged.server.reasoning import (
    HARMONY_REASONING,
    REASONING_FORMATS,
    ReasoningFormat,
    detect_reasoning_format,
)
from paged.server.settings import ServerSettings
from paged.server.tool_parsers.formats import HARMONY, TOOL_FORMATS, ToolFormat, detect_tool_format

logger = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"


def tool_format(settings: ServerSettings, template: str) -> ToolFormat | None:
    """Return the format of tool calls, None if there is none or it is not known.

    Args:
      settings: of the server.
      template: source of the chat template, "" without one.

    Raises: ValueError for an unknown name, or if calls are wanted and their format is not known.
    """
    name: str | None = settings.tool_call_parser
    if name == AUTO:
        name = detect_tool_format(template)
        if name is not None:
            logger.info(
                "Tool calls are read in the format %s, which the chat template describes; choose "
                "another one with --tool-call-parser.",
                name,
            )
    if settings.enable_auto_tool_choice and name in (None, NONE):
        raise ValueError(
            "--enable-auto-tool-choice needs --tool-call-parser: the chat template does not tell "
            f"the format of its calls. Known are {_listed(TOOL_FORMATS)}."
        )
    if name is None or name == NONE:
        return None
    if name not in TOOL_FORMATS:
        raise ValueError(
            f"--tool-call-parser {name} is not known; known are {_listed(TOOL_FORMATS)}, auto and "
            "none."
        )
    return TOOL_FORMATS[name]


def reasoning_format(settings: ServerSettings, template: str) -> ReasoningFormat | None:
    """Return the format of reasoning, None if it stays in the text.

    Raises: ValueError for an unknown name.
    """
    name = settings.reasoning_parser
    if name is None and tool_format(settings, template) is TOOL_FORMATS[HARMONY]:
        name = HARMONY_REASONING  # without which nothing could be told apart
    if name == AUTO:
        name = detect_reasoning_format(template)
        logger.info("Reasoning parser, from the chat template: %s.", name)
    if name is None or name == NONE:
        return None
    if name not in REASONING_FORMATS:
        raise ValueError(
            f"--reasoning-parser {name} is not known; known are {_listed(REASONING_FORMATS)}, auto "
            "and none."
        )
    return REASONING_FORMATS[name]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
