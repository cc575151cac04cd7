"""A plugin for ``--tool-parser-plugin``: each text is a call of the first tool."""

from __future__ import annotations

import json
from typing import Any

from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.tool_parsers import ToolParser, ToolParserManager


@ToolParserManager.register_module("calls_everything")
class CallsEverything(ToolParser):
    """Calls the first tool with the text."""

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        if not request.tools:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        name = request.tools[0].function.name
        call = ToolCall(function=FunctionCall(name=name, arguments=json.dumps({"text": model_output})))
        return ExtractedToolCallInformation(tools_called=True, tool_calls=[call], content=None)
