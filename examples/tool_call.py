"""Let the model of a running server call a function: question, call, result, answer.

pip install openai
python examples/tool_call.py [URL]          # default: http://127.0.0.1:8000
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

try:
    from openai import OpenAI
except ImportError:
    sys.exit("This example needs OpenAI's client: pip install openai (make up does not install it).")

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def get_weather(city: str) -> dict[str, Any]:
    """Return the weather in ``city``; a real program would look it up."""
    return {"temperature": 7, "sky": "rainy", "city": city}


def main(url: str) -> None:
    """Ask the server at ``url`` about the weather, and run the calls that it answers with until it answers in words."""
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("TANDEM_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    for _ in range(4):
        answer = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER], temperature=0)
        message = answer.choices[0].message
        if not message.tool_calls:
            print(message.content)
            return
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            assert call.type == "function"
            print(f"{call.function.name}({call.function.arguments})")
            result = json.dumps(get_weather(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
