from .curves import learning_curve as learning_curve
from .text import render_episode as render_episode
