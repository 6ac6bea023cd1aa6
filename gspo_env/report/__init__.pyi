from .plots import learning_curve as learning_curve
from .run_record import read_run as read_run
from .run_report import write_run_report as write_run_report
