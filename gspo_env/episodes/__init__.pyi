from .schema import EpisodeRecord as EpisodeRecord
from .schema import Episodes as Episodes
from .schema import TurnRecord as TurnRecord
from .schema import read_episodes as read_episodes
from .text import render_episode as render_episode
