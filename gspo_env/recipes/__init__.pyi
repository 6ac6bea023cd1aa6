from .base import Recipe as Recipe
from .conversations import Conversation as Conversation
from .conversations import read_conversations as read_conversations
from .imitate import Imitate as Imitate
from .imitate import SmolLM2 as SmolLM2
from .tiny import Tiny as Tiny
