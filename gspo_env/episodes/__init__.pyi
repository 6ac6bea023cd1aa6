from .records import Episodes as Episodes
from .records import read_episodes as read_episodes
from .schema import EpisodeRecord as EpisodeRecord
from .schema import TurnRecord as TurnRecord
from .text import render_episode as render_episode
