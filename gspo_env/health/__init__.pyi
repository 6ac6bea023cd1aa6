from .diagnose import Diagnosis as Diagnosis
from .diagnose import Finding as Finding
from .diagnose import diagnose as diagnose
from .startup import Problem as Problem
from .startup import StartupChecks as StartupChecks
