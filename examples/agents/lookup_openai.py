"""The look-up agent with the plain `openai` client."""

import json

from openai import DefaultHttpxClient, OpenAI

HTTP = DefaultHttpxClient()  # one pool of connections for all tasks
LOOKUP = {
    "name": "lookup",
    "description": "Look up the word that a word links to.",
    "parameters": {
        "type": "object",
        "properties": {"key": {"type": "string", "description": "The word to look up."}},
        "required": ["key"],
    },
}


def run(task, base_url=None, api_key=None):  # None: OPENAI_BASE_URL and OPENAI_API_KEY
    messages = [
        {"role": "system", "content": task["prompt"]},
        {"role": "user", "content": task["question"]},
    ]
    tools = [{"type": "function", "function": LOOKUP}]
    client = OpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    while True:
        answer = client.chat.completions.create(model="m", messages=messages, tools=tools)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            key = json.loads(call.function.arguments).get("key")
            word = task["links"].get(str(key), "unknown key")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": word})
        if not message.tool_calls:
            return message.content
