from .local import VLLMEngine as VLLMEngine
from .requests import ServerClient as ServerClient
from .requests import ServerList as ServerList
from .server import VLLMServerEngine as VLLMServerEngine
from .settings import VLLM as VLLM
from .settings import VLLMServer as VLLMServer
