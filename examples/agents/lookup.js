// The look-up agent in another language: node reads the task from standard input.
const task = JSON.parse(require("fs").readFileSync(0));
const lookup = {
  name: "lookup",
  description: "Look up the word that a word links to.",
  parameters: {
    type: "object",
    properties: { key: { type: "string", description: "The word to look up." } },
    required: ["key"],
  },
};

async function answer(messages) {
  const response = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { Authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
    body: JSON.stringify({ model: "m", messages, tools: [{ type: "function", function: lookup }] }),
  });
  if (!response.ok) throw new Error(await response.text());
  return (await response.json()).choices[0].message;
}

(async () => {
  const messages = [
    { role: "system", content: task.prompt },
    { role: "user", content: task.question },
  ];
  for (;;) {
    const message = await answer(messages);
    messages.push(message);
    for (const call of message.tool_calls ?? []) {
      const word = task.links[JSON.parse(call.function.arguments).key] ?? "unknown key";
      messages.push({ role: "tool", tool_call_id: call.id, content: word });
    }
    if (!message.tool_calls) return console.log(JSON.stringify(message.content));
  }
})();
