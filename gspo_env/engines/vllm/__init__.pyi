from .local import VLLMEngine as VLLMEngine
from .server import VLLMServerEngine as VLLMServerEngine
from .settings import VLLM as VLLM
from .settings import VLLMServer as VLLMServer
