from .conversation import PromptIds as PromptIds
from .conversation import Transcript as Transcript
from .conversation import tokenize as tokenize
from .encode import TextEncoder as TextEncoder
from .template import ChatTemplate as ChatTemplate
from .tokenizer import ChatTokenizer as ChatTokenizer
