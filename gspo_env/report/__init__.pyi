from .comparison import summarise as summarise
from .comparison import write_report as write_report
