import { Charts } from "./charts";
import { short, type Index } from "./data";

function last(index: Index, name: string): [number, number] | null {
  const points = index.points[name];
  return points ? [points[0][points[0].length - 1], points[1][points[1].length - 1]] : null;
}

export function Summary({ index, theme }: { index: Index; theme: string }) {
  const percent = (value: number) => `${(100 * value).toFixed(1)} %`;
  const success = index.points["eval/success"];
  const facts: [string, string, string][] = [];
  if (success) {
    const ys = success[1];
    const best = Math.max(...ys);
    facts.push(["Success", percent(ys[ys.length - 1]), `of the evaluation after step ${success[0][ys.length - 1]}; at first ${percent(ys[0])}`]);
    facts.push(["Best success", percent(best), `after step ${success[0][ys.indexOf(best)]}`]);
  }
  const reward = last(index, "eval/return");
  if (reward) facts.push(["Return", short(reward[1]), "of that evaluation"]);
  const steps = Math.max(0, ...(index.points["rollout/return"]?.[0] ?? []));
  facts.push(["Steps", String(steps), "of training"]);
  facts.push(["Episodes kept", index.episodes.step.length.toLocaleString("en"), index.left_out ? `of some steps; ${index.left_out} files are left out` : "in this page"]);
  const seconds = ["time/rollout", "time/update", "time/sync", "time/eval"].flatMap((name) => index.points[name]?.[1] ?? []);
  const total = seconds.reduce((sum, value) => sum + value, 0);
  facts.push(["Time", total > 120 ? `${(total / 60).toFixed(1)} min` : `${total.toFixed(1)} s`, "in rollouts, updates and evaluations"]);
  return (
    <main class="summary" tabIndex={-1}>
      <dl class="facts">
        {facts.map(([name, value, more]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>
              <b>{value}</b> <small>{more}</small>
            </dd>
          </div>
        ))}
      </dl>
      {index.run.warnings && <Text title="Warnings" text={index.run.warnings} open kind="warning" />}
      {index.run.failure && <Text title="The first failure of an environment" text={index.run.failure} kind="warning" />}
      <Charts index={index} theme={theme} />
      <Text title="Settings" text={index.run.config} />
    </main>
  );
}

function Text({ title, text, open, kind }: { title: string; text: string; open?: boolean; kind?: string }) {
  return (
    <details class={kind} open={open}>
      <summary>{title}</summary>
      <pre>{text}</pre>
    </details>
  );
}
