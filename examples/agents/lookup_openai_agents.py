"""The look-up agent with the OpenAI Agents SDK."""

from agents import Agent, OpenAIProvider, RunConfig, RunContextWrapper, Runner, function_tool


@function_tool
def lookup(context: RunContextWrapper[dict], key: str) -> str:
    """Look up the word that a word links to.

    Args:
        key: The word to look up.
    """
    return context.context["links"].get(key, "unknown key")


async def run(task, base_url=None, api_key=None):  # None: OPENAI_BASE_URL and OPENAI_API_KEY
    agent = Agent(name="lookup", instructions=task["prompt"], tools=[lookup])
    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    config = RunConfig(model="m", model_provider=provider, tracing_disabled=True)
    result = await Runner.run(agent, task["question"], context=task, run_config=config)
    return result.final_output
