"""Credit by state and action, trusted as far as the group has evidence for it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt

from gspo_env.credit import GiGPO
from gspo_env.credit.statistics import MIN_SCALE
from gspo_env.settings import settings
from gspo_env.types import FloatArray, Turn


@settings
class EvidenceCalibrated(GiGPO):
    """The return's z-score, plus a comparison of actions in equal states, shrunk towards none.

    A_ik = z_g(R_i) + step_weight * rho(s) * z_s(mu(s, u)) for the state s and the action u of turn
    k. In a state that n turns of the group were played in, n_u of them with the action u and the
    mean return-to-go G_u, and with the mean return-to-go mu_s over all n:

    - mu(s, u) = (n_u G_u + shrinkage mu_s) / (n_u + shrinkage);
    - rho(s) = tanh(n / patience) B / (B + W), with the variance between actions
      B = sum over u of n_u (G_u - mu_s)^2 / n, and the variance W within actions.

    z_s is over the n turns of the state. Actions that were seen seldom, and states in which returns
    differ within actions more than between them, thus leave the credit of the episode alone. Equal
    actions have equal `info["action_key"]`, or, without this key, equal texts except for spaces and
    case. A state that occurs once, or that has no key, adds nothing.

    Source:
        ECPO, arXiv 2606.05885. We read its abstract and a summary with the formulas of mu, rho and
        A; `shrinkage` 2 is the summary's default. `patience` and z_s over turns are our reading.

    Example:
        Three episodes play one turn from the same state: "a" returns 1, "b" 0 and "b" 0, so mu_s is
        1/3. Shrunk by 2, mu is (1 + 2/3) / 3 = 5/9 for "a" and (2/3) / 4 = 1/6 for "b". Their mean
        over turns is 8/27. W is 0, so with `patience` 1 and no divisor the first episode gets
        2/3 + tanh(3) (5/9 - 8/27).
    """

    shrinkage: Annotated[float, Ge(0)] = 2.0
    """Turns of the mean return that each action's mean is mixed with, kappa; 0 shrinks nothing."""
    patience: Annotated[float, Gt(0)] = 1.0
    """Turns in a state for its comparison to count by tanh(1), tau."""

    def compare_state(self, returns_N: FloatArray, turns: Sequence[Turn]) -> FloatArray:
        """Computes rho(s) z_s(mu(s, u)) of each turn played in a state."""
        places: dict[str, list[int]] = defaultdict(list)
        for n, turn in enumerate(turns):
            places[_action(turn)].append(n)
        middle, shrunk_N, mean_N = returns_N.mean(), returns_N.copy(), returns_N.copy()
        for same in places.values():
            mean_N[same] = mean = returns_N[same].mean()
            share = len(same) + self.shrinkage
            shrunk_N[same] = (len(same) * mean + self.shrinkage * middle) / share
        between = float(((mean_N - middle) ** 2).mean())
        within = float(((returns_N - mean_N) ** 2).mean())
        if between + within < MIN_SCALE**2:
            return np.zeros(len(returns_N))
        trust = math.tanh(len(returns_N) / self.patience) * between / (between + within)
        weighted: FloatArray = trust * self._z(shrunk_N)
        return weighted


def _action(turn: Turn) -> str:
    """Returns the name of a turn's action."""
    key = turn.info.extra.get("action_key")
    return " ".join(turn.text.split()).casefold() if key is None else str(key)
