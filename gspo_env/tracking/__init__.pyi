from .mlflow import ParentRun as ParentRun
from .mlflow import Tracker as Tracker
from .mlflow import TrackingConfig as TrackingConfig
from .progress import Progress as Progress
