"""The names of the metrics of a run that people compare, and that its rules and pictures read."""

AS_SHIPPED = "eval/success_as_shipped"
"""Success of a pretrained model before its imitation, in the evaluation of step 0."""
IMITATION_STEP = "imitation/step"
"""The step whose weights an imitation kept, if it chose them by pass@k."""
IMITATION_PASS, IMITATION_PASS_LAST = "imitation/pass_at_k", "imitation/pass_at_k_last"
"""Their pass@k, and that of the last weights."""
LATER_TURNS = (
    *("train/logprob_diff_turn_2", "train/logprob_diff_turn_4", "train/logprob_diff_turn_8"),
    "train/logprob_diff_turn_16",
)
"""The difference of engine and trainer in the turns from this one to the next name's."""
REPEATED = "rollout/repeated_marks"
CONTROL, SPIKE = "train/control_token_probability", 0.03
"""The probability of control tokens where they are wrong, and from where on it may be a spike."""
METRICS = frozenset(
    {
        *("eval/success", "eval/success_greedy", "eval/return", "eval/return_std", "eval/tasks"),
        *("eval/turns", "rollout/outcome", "train/loss", "train/kl", "train/logprob_diff_max"),
        *("rollout/staleness_max", "rollout/stop/env_timeout", "rollout/env_timeouts"),
        *("train/logprob_diff_p99", "train/logprob_diff_turn_1", *LATER_TURNS),
        *("rollout/success", "rollout/return", "rollout/return_std", "rollout/turns"),
        *("rollout/tokens", "rollout/episodes_before", "rollout/lost_episodes"),
        *(REPEATED, CONTROL),
        *("rollout/malformed_calls", "rollout/redrawn_tasks", "rollout/staleness_mean"),
        *("rollout/zero_variance_groups", "rollout/stop/max_context", "rollout/stop/max_turns"),
        *("rollout/stop/max_turn_tokens", "rollout/stop/timeout"),
        *("train/advantage_rms", "train/clipped_fraction", "train/entropy", "train/failed_saves"),
        *("train/length_biased_groups", "rollout/paid_alike", "rollout/failure_pay"),
        *("train/grad_norm", "train/logprob_diff_mean", "train/loss_scale"),
        *("train/ratio_outside_clip", "train/skipped_steps", "train/sync_logprob_diff"),
        "tracking/non_finite",
    }
)
"""Each is logged by a part of the training; a rule that asks for another one fails a test."""
