"""A domain of your own for `gspo/Dialogue-v0`: `--env-kwargs domain=examples/shop.py:Shop`."""

from gspo_env import tool
from gspo_env.types import ToolCall
from gspo_envs.dialogue.task import DialogueTask, Domain, Fact

ITEMS = ["lamp", "chair", "table", "clock", "mirror", "sofa", "shelf", "vase"]


class Shop(Domain):
    """Cancel an order."""

    rules = "Ask for the number of the order, cancel it, and say that it is done."

    def draw(self, random):
        """Draws four orders, of which the customer cancels the first."""
        numbers = [str(n) for n in random.choice(range(100, 1000), 4, replace=False)]
        rows = ", ".join(f"('{n}', 'pending')" for n in numbers)
        opening = f"Please cancel my {random.choice(ITEMS)}."
        fact = f"My order is #{numbers[0]}."
        question = "What is its number?"
        return DialogueTask(
            script=f"CREATE TABLE orders (number, status); INSERT INTO orders VALUES {rows};",
            opening=opening,
            persona=str(random.choice(["terse", "chatty", "forthcoming"])),
            facts=(Fact(keywords="number", text=fact, question=question),),
            actions=(ToolCall(name="cancel", arguments={"order": numbers[0]}),),
        )

    @tool
    def cancel(self, order: str) -> str:
        """Cancel an order."""
        sql = "UPDATE orders SET status = 'cancelled' WHERE number = ? RETURNING number"
        return "cancelled" if self.rows(sql, order) else "no such order"
