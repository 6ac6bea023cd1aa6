from .policy import ChatPolicy as ChatPolicy
from .records import LateRewardError as LateRewardError
from .records import RefusedError as RefusedError
from .records import Reply as Reply
from .records import Request as Request
from .server import PolicyServer as PolicyServer
from .server import address as address
from .session import Session as Session
