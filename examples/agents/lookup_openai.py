"""Follow links with a lookup tool; the plain `openai` client."""

import json

from openai import AsyncOpenAI

SYSTEM = (
    "Follow the links with the lookup tool, one call per turn. Each call returns the next "
    "word. After the last link, answer with <answer>word</answer>."
)
LOOKUP = {
    "name": "lookup",
    "description": "Look up the word that a word links to; unknown key where there is none.",
    "parameters": {
        "type": "object",
        "properties": {"key": {"type": "string", "description": "The word to look up."}},
        "required": ["key"],
    },
}


async def run(task, base_url=None, api_key=None):  # None: OPENAI_BASE_URL and OPENAI_API_KEY
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=[{"type": "function", "function": LOOKUP}]
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                key = json.loads(call.function.arguments).get("key")
                word = task["links"].get(key, "unknown key")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": word})
            if not message.tool_calls:
                return message.content
