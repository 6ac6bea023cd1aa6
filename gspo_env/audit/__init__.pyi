from .auditor import Audit as Audit
from .auditor import Row as Row
from .auditor import audit as audit
