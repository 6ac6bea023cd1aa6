from .diagnose import Diagnosis as Diagnosis
from .diagnose import diagnose as diagnose
from .findings import Finding as Finding
from .run_rules import RULES as RULES
