"""`examples/read_comparison.py` compares the seeds of the runs that are finished."""

import json
import runpy


def test_a_failed_run_leaves_the_means_of_the_others(tmp_path, capsys):
    for arm, seeds in {"a": (0.1, 0.3), "b": (0.5, None)}.items():
        for seed, value in enumerate(seeds):
            folder = tmp_path / "runs" / "game" / arm / f"seed{seed}"
            folder.mkdir(parents=True)
            lines = [{"step": n, "metrics": {"rollout/success": value or 0.9}} for n in (1, 2)]
            (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
            if value is not None:
                (folder / "model").mkdir()
    runpy.run_path("examples/read_comparison.py")["main"](str(tmp_path))
    shown = capsys.readouterr().out
    assert "game, a: mean 0.200 over 2 seeds" in shown
    assert "game, b: mean 0.500 over 1 seeds" in shown
