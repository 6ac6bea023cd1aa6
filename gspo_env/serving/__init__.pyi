from .address import Address as Address
from .address import Session as Session
from .address import address as address
from .calls import parse_message as parse_message
from .records import LateRewardError as LateRewardError
from .records import RefusedError as RefusedError
from .records import Reply as Reply
from .records import Request as Request
