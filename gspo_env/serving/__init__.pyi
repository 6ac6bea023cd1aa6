from .policy import ChatPolicy as ChatPolicy
from .server import PolicyServer as PolicyServer
from .server import address as address
from .session import LateRewardError as LateRewardError
from .session import Reply as Reply
from .session import Request as Request
from .session import Session as Session
