from .curves import learning_curve as learning_curve
from .episodes import EpisodeRecord as EpisodeRecord
from .episodes import Episodes as Episodes
from .episodes import TurnRecord as TurnRecord
from .episodes import read_episodes as read_episodes
from .episodes_page import write_page as write_page
from .text import render_episode as render_episode
