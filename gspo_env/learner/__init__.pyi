from .learner import Learner as Learner
from .learner import ObjectiveConfig as ObjectiveConfig
from .objectives import ObjectiveOutput as ObjectiveOutput
from .objectives import importance_weights as importance_weights
from .objectives import packed_policy_loss as packed_policy_loss
from .objectives import policy_loss as policy_loss
from .settings import LearnerConfig as LearnerConfig
