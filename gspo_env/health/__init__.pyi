from .diagnose import Diagnosis as Diagnosis
from .diagnose import diagnose as diagnose
from .findings import Finding as Finding
from .record import RunRecord as RunRecord
from .rules import RULES as RULES
