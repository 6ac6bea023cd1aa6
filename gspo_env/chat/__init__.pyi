from .conversation import PromptIds as PromptIds
from .conversation import Transcript as Transcript
from .conversation import tokenize as tokenize
from .plain_text import PlainText as PlainText
from .template import ChatTemplate as ChatTemplate
from .transcript import ChatTokenizer as ChatTokenizer
