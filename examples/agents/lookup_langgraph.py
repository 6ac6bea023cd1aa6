"""The look-up agent with LangGraph."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def run(task, base_url=None, api_key=None):  # None: OPENAI_BASE_URL and OPENAI_API_KEY
    @tool
    def lookup(key: str) -> str:
        """Look up the word that a word links to."""
        return task["links"].get(key, "unknown key")

    address = {"base_url": base_url, "api_key": api_key} if base_url else {}
    model = ChatOpenAI(model="m", **address).bind_tools([lookup])

    def answer(state):
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("tools", ToolNode([lookup]))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", tools_condition)
    graph.add_edge("tools", "answer")
    messages = [("system", task["prompt"]), ("user", task["question"])]
    return graph.compile().invoke({"messages": messages})["messages"][-1].content
