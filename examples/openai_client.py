"""Chat with a running server through OpenAI's own client: one answer, then a stream.

pip install openai
python examples/openai_client.py [URL]          # default: http://127.0.0.1:8000
"""

from __future__ import annotations

import os
import sys

try:
    from openai import OpenAI
except ImportError:
    sys.exit("This example needs OpenAI's client: pip install openai (make up does not install it).")


def main(url: str) -> None:
    """Print a whole answer and a streamed one of the server at ``url``."""
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("TANDEM_API_KEY", "none"))
    model = client.models.list().data[0].id

    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "What does a prefill worker do?"}], max_tokens=64
    )
    print(answer.choices[0].message.content)

    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=64, stream=True
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
